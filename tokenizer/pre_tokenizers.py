"""How byte-level BPE vocabularies cut text into words, inside which byte pairs are then merged; by `tokenizer.ggml.pre`.

The patterns are those of the models' own `tokenizer.json` files, which llama.cpp names in GGUF files.
"""

import dataclasses

import tokenizers
from tokenizers import pre_tokenizers

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions
_NUMBER = r"\p{N}"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
QWEN2 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
QWEN35 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIXES}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIXES}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
DEEPSEEK_V3 = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|""" + _SPACES
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The letters with case, and their like, of all scripts, as the model's authors list them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d"
    "\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d"
    "\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """What a value of `tokenizer.ggml.pre` says of a vocabulary."""

    patterns: tuple[str, ...]  # applied one after the other: what a pattern matches is a word, and so is what lies between
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges make of it
    adds_bos: bool = False  # where the file does not say

    def build(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_BY_RULE = {
    PreTokenizer((GPT2,)): "gpt-2 phi-2 olmo jais mpt exaone4 granite-docling jina-es jina-de jina-v1-en",
    PreTokenizer((_NUMBER, GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b",
    PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    PreTokenizer((LLAMA3,)): "dbrx smaug-bpe chatglm-bpe glm4",
    PreTokenizer((QWEN2,)): "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan",
    PreTokenizer((QWEN35,)): "qwen35",
    PreTokenizer((O200K,)): "gpt-4o llama4",
    PreTokenizer((TEKKEN,), ignore_merges=True, adds_bos=True): "tekken",
    PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK_V3)): "deepseek-v3 hunyuan-dense",
    PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN_AND_HANGUL,
            r"\p{N}+",
        )
    ): "deepseek-llm",
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, _NUMBER)): "deepseek-coder",
    PreTokenizer((r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]")): "falcon",
    PreTokenizer((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): "default",
}
PRE_TOKENIZERS = {name: rule for rule, names in _BY_RULE.items() for name in names.split()}
