"""Fits the costs of kv_engine.py's steps to real engines: on some workloads, judged on others.

    .venv/bin/python benchmarks/fit_costs.py h100            by published throughputs
    .venv/bin/python benchmarks/fit_costs.py cpu --json F    by vLLM on this machine's CPU (.venv-vllm); minutes

When all calls wait from the beginning, the order of steps does not depend on what they cost. So the model counts each
workload's work, and non-negative least squares finds the costs from the measured durations, by relative error.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from kv_engine import BLOCK, Call, Engine, Hardware, Work, run_offline

ROOT = Path(__file__).parents[1]

H100: dict[tuple[int, int], tuple[int, int]] = {
    (128, 128): (28312, 30000),
    (128, 2048): (22714, 3000),
    (128, 4096): (14325, 1500),
    (500, 2000): (17660, 3000),
    (1000, 1000): (15220, 3000),
    (1000, 2000): (13899, 1500),
    (2048, 128): (3450, 3000),
    (2048, 2048): (9305, 1500),
    (5000, 500): (3459, 1500),
    (20000, 2000): (1351, 1000),
}
"""Output tokens a second and number of requests by (input, output) tokens: nvidia/Llama-3.1-8B-Instruct-FP8 on one H100
SXM 80GB in the performance overview of TensorRT-LLM 1.0."""
H100_FITTED = [(128, 128), (128, 2048), (1000, 1000), (2048, 128), (2048, 2048), (20000, 2000)]
H100_TOKENS = 1_000_000
"""Tokens of its KV cache: 8-bit keys and values (64 KiB a token), in 90 % of what 8 GB of weights leave of 80 GB."""

H100_STEP_S = 5e-3
"""Assumed cost of a step itself. All published workloads keep the KV cache full, so that they cannot tell it from the
reading of the cache; 8 GB of weights take 2.4 ms at 3.35 TB/s, launches and sampling the rest."""

CPU_BLOCK, CPU_BLOCKS, CPU_SEQS, CPU_BATCHED = 128, 96, 16, 512
"""vLLM's own block on a CPU, and bounds small enough for eviction and preemption."""
CPU_FITTED = ["one", "short", "batch", "long prompts", "long answers"]
REPEATS = 3
"""Runs of each workload on the CPU, of which the fastest counts."""

Round = list[tuple[int, int, int]]
"""Calls that wait together: (trajectory, prompt tokens, output tokens)."""
Costs = tuple[float, ...]


def cpu_workloads() -> dict[str, list[Round]]:
    """Rounds by workload. A trajectory's prompt begins with its earlier ones and what it answered."""
    draw = random.Random(5)

    def equal(count: int, prompt: int, output: int) -> list[Round]:
        return [[(number, prompt, output) for number in range(count)]]

    def agents(count: int, turns: int, prompt: int, output: int) -> list[Round]:
        lengths = [draw.randint(prompt // 2, 3 * prompt // 2) for _ in range(count)]
        rounds: list[Round] = []
        for _ in range(turns):
            rounds.append(
                [(number, length, draw.randint(output // 4, 2 * output)) for number, length in enumerate(lengths)]
            )
            lengths = [length + made + draw.randint(8, 64) for _, length, made in rounds[-1]]
        return rounds

    return {
        "one": equal(1, 16, 200),
        "short": equal(32, 16, 64),
        "batch": equal(32, 200, 64),
        "long prompts": equal(32, 900, 4),
        "long answers": equal(16, 100, 600),
        "agents, 4 turns": agents(12, 4, 150, 60),
        "agents, 8 turns": agents(8, 8, 100, 30),
        "full cache": agents(40, 3, 300, 80),
    }


def measure_cpu(folder: str) -> None:
    """Print the seconds of each workload with vLLM, whose interpreter runs this."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config
    from vllm import LLM, SamplingParams, TokensPrompt  # pyright: ignore[reportMissingImports]  another environment

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        max_position_embeddings=2048,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=CPU_SEQS,
        max_num_batched_tokens=CPU_BATCHED,
        block_size=CPU_BLOCK,
        num_gpu_blocks_override=CPU_BLOCKS,
        enable_prefix_caching=True,
    )

    def run(rounds: list[Round], draw: random.Random) -> float:
        llm.reset_prefix_cache()
        texts: dict[int, list[int]] = {}
        seconds = 0.0
        for calls in rounds:
            for number, prompt, _ in calls:
                text = texts.setdefault(number, [])
                text.extend(draw.randrange(1, 1024) for _ in range(prompt - len(text)))
            prompts = [TokensPrompt(prompt_token_ids=list(texts[number])) for number, _, _ in calls]
            params = [SamplingParams(max_tokens=made, ignore_eos=True, detokenize=False) for _, _, made in calls]
            began = time.perf_counter()
            answers = llm.generate(prompts, params, use_tqdm=False)
            seconds += time.perf_counter() - began
            for (number, _, _), answer in zip(calls, answers, strict=True):
                texts[number].extend(answer.outputs[0].token_ids)
        return seconds

    workloads, draw = cpu_workloads(), random.Random(0)
    run(workloads["one"], draw)
    seconds = {name: min(run(rounds, draw) for _ in range(REPEATS)) for name, rounds in workloads.items()}
    print("MEASURED " + json.dumps(seconds), flush=True)


def measured_cpu() -> dict[str, float]:
    """The seconds of each workload with vLLM on this machine."""
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(ROOT / ".venv-vllm/bin/python"), __file__, "measure", "--folder", folder]
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    [line] = (line for line in output.splitlines() if line.startswith("MEASURED "))
    return json.loads(line.removeprefix("MEASURED "))


def cpu_work(rounds: list[Round]) -> Work:
    """The model's work on the CPU's workload."""
    engine = Engine(Hardware(Work(1.0), CPU_BLOCKS, CPU_SEQS, CPU_BATCHED, CPU_BLOCK))
    for calls in rounds:
        run_offline(engine, [Call(number, number, 0, prompt, output) for number, prompt, output in calls])
    return engine.work


def h100_work(prompt: int, output: int, count: int) -> Work:
    """The model's work on a workload of the published table."""
    engine = Engine(Hardware(Work(1.0), H100_TOKENS // BLOCK, 2048, 8192))
    run_offline(engine, [Call(number, number, 0, prompt, output) for number in range(count)])
    return engine.work


def fitted(
    work: Mapping[Any, Work], seconds: Mapping[Any, float], names: Sequence[Any], step_s: float | None = None
) -> Work:
    """Costs that are not negative, by least squares of the relative errors of these workloads."""
    import numpy  # not at the top: `measure` runs in vLLM's environment
    from scipy.optimize import nnls

    known = [0.0 if step_s is None else work[name].steps * step_s for name in names]
    rows = numpy.array([work[name][step_s is not None :] for name in names])
    rows = rows / numpy.array([[seconds[name]] for name in names])
    scale = rows.max(axis=0)
    rest = [1 - part / seconds[name] for part, name in zip(known, names, strict=True)]
    costs, _ = nnls(rows / scale, numpy.array(rest))
    found = [float(cost) for cost in costs / scale]
    return Work(*found) if step_s is None else Work(step_s, *found)


def main() -> None:
    """Fit, and print each workload's error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["h100", "cpu", "measure"])
    parser.add_argument("--folder", help="of the model that `measure` makes")
    parser.add_argument("--seconds", type=json.loads, help="durations measured before, instead of running vLLM")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.which == "measure":
        measure_cpu(options.folder)
        return
    if options.which == "h100":
        names: list[Any] = [*H100]
        seconds = {name: name[1] * count / rate for name, (rate, count) in H100.items()}
        work = {name: h100_work(*name, count) for name, (_, count) in H100.items()}
        used: list[Any] = H100_FITTED
    else:
        seconds = options.seconds or measured_cpu()
        names = [*seconds]
        work = {name: cpu_work(rounds) for name, rounds in cpu_workloads().items()}
        used = CPU_FITTED
    costs = fitted(work, seconds, used, H100_STEP_S if options.which == "h100" else None)
    errors = {str(name): work[name].seconds(costs) / seconds[name] - 1 for name in names}
    judged = [abs(error) for name, error in zip(names, errors.values(), strict=True) if name not in used]
    report = {"costs": costs._asdict(), "seconds": {str(name): seconds[name] for name in names}, "errors": errors}
    report |= {"judged_mean": sum(judged) / len(judged), "judged_max": max(judged)}
    if options.json:
        print(json.dumps(report, indent=1))
        return
    print(" ".join(f"{name}={cost:.3g}" for name, cost in costs._asdict().items()))
    for name in names:
        kind = "fitted" if name in used else "judged"
        print(f"{name!s:18} {kind} {seconds[name]:9.2f} s measured, {errors[str(name)]:+.1%}")


if __name__ == "__main__":
    main()
