"""Floor 5: text to token ids and back, and the chat template that a model was trained on."""

from tokenizer.chat import ChatTemplate
from tokenizer.detokenizer import StreamingDetokenizer
from tokenizer.from_folder import tokenizer_from_folder
from tokenizer.from_gguf import tokenizer_from_gguf
from tokenizer.saved import tokenizer_from_saved
from tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "StreamingDetokenizer", "Tokenizer", "tokenizer_from_folder", "tokenizer_from_gguf", "tokenizer_from_saved"]
