"""A GGUF file through Hugging Face transformers, with its weights dequantized.

`python dequantized.py MODEL f32|bf16 FOLDER` writes it as a Hugging Face folder, for a stack that reads no GGUF.
"""

import os
import sys

import torch
import transformers

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def load(path, dtype):
    """Returns the tokenizer and the model, all of whose parameters are of the dtype that is named.

    Raises:
      TypeError: transformers kept some parameters in another one.
    """
    folder, file = os.path.split(path)
    dense = {}
    if hasattr(transformers, "GgufConfig"):  # versions that could keep the weights packed
        dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    wanted = DTYPES[dtype]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=wanted, **dense).eval()
    if other := {str(parameter.dtype) for parameter in model.parameters()} - {str(wanted)}:
        raise TypeError(f"weights were loaded as {', '.join(sorted(other))} where {wanted} was asked for")
    return tokenizer, model


if __name__ == "__main__":
    path, dtype, folder = sys.argv[1:]
    for part in load(path, dtype):
        part.save_pretrained(folder)
