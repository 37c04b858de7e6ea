"""Chat templates of six families, each with a small tokenizer of its kind.

Byte-level ones (Qwen's, Llama 3's, Phi-3's) have a token per byte; the others are SentencePiece's kind: a token per
character, spaces as `▁`, and bytes for the rest.
"""

from dataclasses import dataclass
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_QWEN = """{%- if tools %}{{- "<|im_start|>system\\n" }}
{%- if messages[0].role == "system" %}{{- messages[0].content + "\\n\\n" }}{%- endif %}
{{- "# Tools\\n\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == "system" %}{{- "<|im_start|>system\\n" + messages[0].content + "<|im_end|>\\n" }}
{%- endif %}{%- for message in messages %}{%- if message.role == "user" %}
{{- "<|im_start|>user\\n" + message.content + "<|im_end|>\\n" }}
{%- elif message.role == "assistant" %}{{- "<|im_start|>assistant" }}
{%- if message.content %}{{- "\\n" + message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- "}\\n</tool_call>" }}{%- endfor %}{{- "<|im_end|>\\n" }}
{%- elif message.role == "tool" %}{%- if loop.previtem.role != "tool" %}{{- "<|im_start|>user" }}{%- endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or loop.nextitem.role != "tool" %}{{- "<|im_end|>\\n" }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""

_LLAMA_3 = """{{- bos_token }}{%- if messages[0].role == "system" %}{%- set system = messages[0].content | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
{%- if message.role == "tool" %}{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
{{- message.content | tojson }}{{- "<|eot_id|>" }}
{%- elif message.tool_calls %}{%- if message.tool_calls | length != 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" + '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
{%- else %}{{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" }}
{%- if tools and loop.first %}{{- "Respond with a JSON for a function call with its proper arguments.\\n\\n" }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{{- message.content | trim }}{{- "<|eot_id|>" }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{%- endif %}"""

_MISTRAL_V1 = """{{- bos_token }}{%- for message in messages %}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}{%- endif %}
{%- if message.role == "user" %}{{- "[INST] " + message.content + " [/INST]" }}
{%- elif message.role == "assistant" %}{{- message.content + eos_token }}
{%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}{%- endfor %}"""

_MISTRAL_TOOLS = """{%- set ns = namespace(turn=0) %}{%- for message in messages %}
{%- if message.role != "tool" and not message.tool_calls and message.role != "system" %}
{%- if (message.role == "user") != (ns.turn % 2 == 0) %}
{{- raise_exception("After the optional system message, roles must alternate user/assistant/user/assistant/...") }}
{%- endif %}{%- set ns.turn = ns.turn + 1 %}{%- endif %}{%- endfor %}
{{- bos_token }}{%- for message in messages %}
{%- if message.role == "user" %}{%- if tools and loop.last %}{{- "[AVAILABLE_TOOLS] " }}{{- tools | tojson }}
{{- "[/AVAILABLE_TOOLS]" }}{%- endif %}{{- "[INST] " + message.content + "[/INST]" }}
{%- elif message.role == "system" %}{{- "[SYSTEM_PROMPT] " + message.content + "[/SYSTEM_PROMPT]" }}
{%- elif message.tool_calls %}{{- "[TOOL_CALLS] [" }}{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}{{- "]" + eos_token }}
{%- elif message.role == "assistant" %}{{- " " + message.content + eos_token }}
{%- elif message.role == "tool" %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' }}{{- message.content | tojson }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"""

_GEMMA = """{{- bos_token }}{%- if messages[0].role == "system" %}{{- raise_exception("System role not supported") }}
{%- endif %}{%- for message in messages %}{%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}{%- endif %}
{{- "<start_of_turn>" + ("model" if message.role == "assistant" else message.role) + "\\n" }}
{{- message.content | trim }}{{- "<end_of_turn>\\n" }}{%- endfor %}
{%- if add_generation_prompt %}{{- "<start_of_turn>model\\n" }}{%- endif %}"""

_PHI_3 = """{%- for message in messages %}{%- if message.role in ("system", "user", "assistant") %}
{{- "<|" + message.role + "|>\\n" + message.content + "<|end|>\\n" }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|>\\n" }}{%- else %}{{- eos_token }}{%- endif %}"""

_VICUNA = """{%- if messages[0].role == "system" %}{{- messages[0].content + "\\n\\n" }}{%- endif %}
{%- for message in messages %}{%- if message.role == "user" %}{{- "USER: " + message.content + "\\n" }}
{%- elif message.role == "tool" %}{{- "TOOL: " + message.content + "\\n" }}
{%- elif message.role == "assistant" %}{{- "ASSISTANT: " + message.content + "\\n" }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "ASSISTANT:" }}{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """A chat template and its tokenizer."""

    template: str
    end: str
    """What the model writes at the end of a turn."""
    special: tuple[str, ...] = ()
    """Further special tokens."""
    kind: Literal["bytes", "first", "every"] = "bytes"
    """Bytes, or SentencePiece's: with `▁` before the first word of a text, or of every part between special tokens."""
    bos: str | None = None
    added: tuple[str, ...] = ()
    """Added tokens that are not special."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A new tokenizer of the family."""
        core = _bytes() if self.kind == "bytes" else _sentencepiece(every=self.kind == "every")
        core.add_special_tokens([*([self.bos] if self.bos else []), self.end, *self.special])
        core.add_tokens([AddedToken(text, special=False) for text in self.added])
        return PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token=self.bos, eos_token=self.end, chat_template=self.template
        )


_INST = ("[INST]", "[/INST]")
_MISTRAL_MARKS = (
    *(*_INST, "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]"),
)
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>", "<|end_of_text|>")
FAMILIES = {
    "qwen": Family(_QWEN, "<|im_end|>", ("<|im_start|>",), added=("<tool_call>", "</tool_call>")),
    "llama3": Family(_LLAMA_3, "<|eot_id|>", _HEADERS, bos="<|begin_of_text|>"),
    "mistral": Family(_MISTRAL_TOOLS, "</s>", _MISTRAL_MARKS, kind="first", bos="<s>"),
    "mistral_v1": Family(_MISTRAL_V1, "</s>", kind="every", bos="<s>"),
    "gemma": Family(_GEMMA, "<end_of_turn>", ("<start_of_turn>", "<eos>"), kind="first", bos="<bos>"),
    "phi3": Family(_PHI_3, "<|end|>", ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>")),
    "vicuna": Family(_VICUNA, "</s>", kind="every", bos="<s>"),
}


def _bytes() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: place for place, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return core


def _sentencepiece(*, every: bool) -> Tokenizer:
    characters = ["▁", *map(chr, range(33, 127))]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocab |= {character: len(vocab) + place for place, character in enumerate(characters)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if every:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core
