"""Which experts a token goes to, and with what weights: the router's choice, as data and one pure function."""

import dataclasses

import jax
import jax.numpy as jnp

from runtime import UserError

SCORINGS = ("softmax", "sigmoid", "softmax_topk")


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Mixtral (arXiv 2401.04088) and Qwen score by softmax over all experts, gpt-oss (arXiv 2508.10925) over the chosen ones only
    ("softmax_topk"), DeepSeek-V3 (arXiv 2412.19437) by sigmoid, with groups of experts and a bias that balances their load."""

    num_experts: int  # E
    top_k: int  # k, experts per token
    scoring: str = "softmax"
    normalize: bool = False  # the chosen weights are divided by their sum
    scale: float = 1.0  # multiplies the weights, after that
    num_groups: int = 1  # of consecutive experts
    groups_kept: int = 1  # experts are chosen from these groups only: those with the largest sum of their two best scores
    choice_bias: bool = False  # a bias per expert is added to the scores for the choice, not for the weights

    def __post_init__(self):
        E, k, groups, kept = self.num_experts, self.top_k, self.num_groups, self.groups_kept
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring={self.scoring!r} is not known: use one of {', '.join(SCORINGS)}")
        if not 1 <= k <= E:
            raise UserError(f"top_k {k} is not within 1 to num_experts {E}: the checkpoint's metadata is damaged")
        if groups < 1 or E % groups:
            raise UserError(f"num_experts {E} is not a multiple of num_groups {groups}: the checkpoint's metadata is damaged")
        if not 1 <= kept <= groups:
            raise UserError(f"groups_kept {kept} is not within 1 to num_groups {groups}: the checkpoint's metadata is damaged")
        if kept < groups and E // groups < 2:
            raise UserError(f"num_groups {groups} leaves {E // groups} expert per group: groups are kept by the sum of their best 2")
        if k > kept * (E // groups):
            raise UserError(f"top_k {k} is more than the {kept * (E // groups)} experts of groups_kept {kept}: the metadata is damaged")


def route(logits: jax.Array, config: RouterConfig, bias: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, best first (of equals the lowest index), and their weights. All in f32.

    Args:
      logits: [T, E].
      config: static.
      bias: [E], exactly if config.choice_bias.

    Returns:
      indices int32 [T, k] and weights f32 [T, k].
    """
    if (bias is not None) != config.choice_bias:
        raise ValueError(f"choice_bias={config.choice_bias}, but bias is {'missing' if bias is None else 'given'}")
    logits = logits.astype(jnp.float32)
    match config.scoring:
        case "softmax":
            scores = jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            scores = jax.nn.sigmoid(logits)
        case "softmax_topk":
            scores = logits
    preferences = scores if bias is None else scores + bias.astype(jnp.float32)
    if config.groups_kept < config.num_groups:
        preferences = jnp.where(_in_kept_groups(preferences, config), preferences, -jnp.inf)
    _, indices = jax.lax.top_k(preferences, config.top_k)
    weights = jnp.take_along_axis(scores, indices, axis=-1)
    if config.scoring == "softmax_topk":
        weights = jax.nn.softmax(weights, axis=-1)
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return indices, weights * config.scale


def _in_kept_groups(preferences, config):  # [T, E] -> bool [T, E]
    T, E = preferences.shape
    groups = config.num_groups
    best, _ = jax.lax.top_k(preferences.reshape(T, groups, E // groups), 2)
    _, kept = jax.lax.top_k(best.sum(-1), config.groups_kept)  # [T, groups_kept]
    keep = (kept[..., None] == jnp.arange(groups)).any(1)  # [T, groups]
    return jnp.repeat(keep, E // groups, axis=1)
