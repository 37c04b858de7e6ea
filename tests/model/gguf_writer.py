"""Writes a GGUF file of a small Llama whose weights the encodings hold exactly."""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

HEADS, KV_HEADS, DIM, HIDDEN, INNER, LAYERS = 4, 2, 16, 64, 96, 2
F32, F16, Q4_1, Q5_K, Q8_0 = 0, 1, 3, 13, 8
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TOKENS = [*CONTROL, *sorted(ByteLevel.alphabet()), "lo", "low"]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.block_count": LAYERS,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 512,
    "llama.rope.freq_base": 100000.0,
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3 if token in CONTROL else 1 for token in TOKENS],
    "tokenizer.ggml.merges": ["l o", "lo w"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}


class Encoded(NamedTuple):
    """A tensor as it lies in the file, and its values."""

    kind: int
    data: bytes
    values: np.ndarray


def encoded(kind: int, shape: tuple[int, ...], rng: np.random.Generator) -> Encoded:
    """Random values of about 0.1 in an encoding."""
    count = int(np.prod(shape))
    if kind in (F32, F16):
        values = rng.normal(0, 0.1, count).astype(np.float32 if kind == F32 else np.float16)
        return Encoded(kind, values.tobytes(), values.astype(np.float32).reshape(shape))
    blocks = count // 32
    scale = rng.uniform(0.001, 0.01, (blocks, 1)).astype(np.float16)
    if kind == Q8_0:
        whole = rng.integers(-127, 128, (blocks, 32)).astype(np.int8)
        values = scale.astype(np.float32) * whole
        data = np.concatenate([scale.view(np.uint8), whole.view(np.uint8)], axis=1)
    else:
        least = rng.uniform(-0.1, 0.0, (blocks, 1)).astype(np.float16)
        whole = rng.integers(0, 16, (blocks, 32)).astype(np.uint8)
        values = scale.astype(np.float32) * whole + least.astype(np.float32)
        halves = whole[:, :16] | whole[:, 16:] << 4  # a byte has the values i and i + 16
        data = np.concatenate([scale.view(np.uint8), least.view(np.uint8), halves], axis=1)
    return Encoded(kind, data.tobytes(), values.reshape(shape))


def tensors() -> dict[str, Encoded]:
    """By name; each encoding occurs."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, tuple[int, ...]]] = {
        "token_embd.weight": (Q8_0, (len(TOKENS), HIDDEN)),
        "output_norm.weight": (F32, (HIDDEN,)),
    }
    for block in range(LAYERS):
        shapes |= {
            f"blk.{block}.attn_norm.weight": (F32, (HIDDEN,)),
            f"blk.{block}.attn_q.weight": (Q4_1, (HEADS * DIM, HIDDEN)),
            f"blk.{block}.attn_k.weight": (Q4_1, (KV_HEADS * DIM, HIDDEN)),
            f"blk.{block}.attn_v.weight": (Q8_0, (KV_HEADS * DIM, HIDDEN)),
            f"blk.{block}.attn_output.weight": (F16, (HIDDEN, HEADS * DIM)),
            f"blk.{block}.ffn_norm.weight": (F32, (HIDDEN,)),
            f"blk.{block}.ffn_gate.weight": (Q4_1, (INNER, HIDDEN)),
            f"blk.{block}.ffn_up.weight": (Q4_1, (INNER, HIDDEN)),
            f"blk.{block}.ffn_down.weight": (Q4_1, (HIDDEN, INNER)),
        }
    return {name: encoded(kind, shape, rng) for name, (kind, shape) in shapes.items()}


def write_gguf(path: Path, metadata: dict[str, Any], held: dict[str, Encoded]) -> Path:
    """Version 3, little-endian."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(held), len(metadata))
    for name, value in metadata.items():
        head += _string(name) + _typed(value)
    data = b""
    for name, tensor in held.items():
        shape = tensor.values.shape[::-1]
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.kind, len(data))
        data += tensor.data + bytes(-len(tensor.data) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    if isinstance(value, list):
        items = [_typed(item) for item in value]
        return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
