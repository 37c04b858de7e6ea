"""The limit on simulated replicas: as good as the best fixed number, without the preemptions of a larger one."""

import json

import benchmarks.in_flight as in_flight
import pytest


def test_the_limit_does_as_well_as_the_best_fixed_number(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workload", "long answers", "--replicas", "1", "--seeds", "1", "--rounds", "10"]
    in_flight.main([*words, "--load", "1", "--load", "1.25", "--json"])
    found = json.loads(capsys.readouterr().out)
    workload = found["workloads"]["long answers"]
    assert (workload["best_fixed"], found["of_best_fixed_min"]) == (1.0, workload["of_best_fixed"])
    assert workload["of_best_fixed"] > 0.97
    assert workload["fixed"]["1.25"]["preempted"] > 1000
    assert workload["adaptive"]["preempted"] < 100


def test_clients_that_limit_by_themselves_share_the_replicas() -> None:
    together, apart = (in_flight.run("8 turns", 0.0, 1, clients, 8.0, 1) for clients in (1, 4))
    assert apart.rate > 0.9 * together.rate  # each learns the lengths by itself
    assert apart.preempted == 0
