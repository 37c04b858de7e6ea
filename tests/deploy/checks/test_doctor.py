"""`trackway doctor`: it lists what a machine lacks, each with its remedy, and sets the exit status."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.services.chat.families import FAMILIES
from trackway.deploy.checks import doctor
from trackway.deploy.checks.doctor import DEMO_EXTRAS, OTHER_EXTRAS, Examination, Finding, examine
from trackway.deploy.cli import app
from trackway.deploy.local import preflight
from trackway.deploy.local.preflight import missing_packages
from trackway.deploy.local.settings import UpSettings

FREE = {"port": 0, "dashboard_port": 0, "ray_port": 0, "mlflow_port": 0, "min_memory_gb": 0.001}


def examined(tmp_path: Path, **settings: object) -> Examination:
    return examine(UpSettings.model_validate({"outputs": tmp_path / "out", **FREE, **settings}))


def found(examination: Examination, name: str) -> Finding:
    return next(finding for finding in examination.findings if finding.name == name)


def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str, **settings: object) -> Result:
    for name, value in {**FREE, **settings}.items():
        monkeypatch.setenv(f"TRACKWAY_UP_{name.upper()}", str(value))
    return CliRunner().invoke(app, ["doctor", "--outputs", str(tmp_path), *words])


def test_a_machine_that_has_everything_for_the_demo_has_exit_status_0(monkeypatch, tmp_path: Path):
    result = command(monkeypatch, tmp_path, "--json")

    examination = Examination.model_validate(json.loads(result.stdout))
    assert (result.exit_code, examination.demo) == (0, True)
    assert {finding.name for finding in examination.findings if finding.demo} == {
        *("Python", "chat template", "memory", "port 0", f"disk of {tmp_path}"),
        *(f"trackway[{extra}]" for extra in DEMO_EXTRAS),
    }


def test_a_port_in_use_is_told_with_its_option_and_exit_status_1(monkeypatch, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = command(monkeypatch, tmp_path, mlflow_port=port)

    assert result.exit_code == 1
    assert f"`trackway demo` cannot run here: port {port}" in result.stdout
    assert "choose another with --mlflow-port" in " ".join(result.stdout.split())


def test_a_package_that_is_missing_is_told_with_the_extra_that_has_it(monkeypatch, tmp_path: Path):
    installed = preflight.distribution

    def without_two(name: str):
        if name in ("cachetools", "wandb"):
            raise preflight.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(preflight, "distribution", without_two)
    examination = examined(tmp_path)

    agent, wandb = found(examination, "trackway[agent]"), found(examination, "trackway[wandb]")
    assert (agent.ok, agent.found, agent.remedy) == (False, "lacks cachetools", "pip install 'trackway[agent]'")
    assert (wandb.ok, wandb.demo) == (False, False)
    assert not examination.demo
    assert missing_packages("cpu") == ["cachetools", "wandb"]


def test_every_extra_of_the_demo_exists_and_one_that_does_not_is_refused():
    assert [missing_packages(extra) for extra in (*DEMO_EXTRAS, *OTHER_EXTRAS)] == [[]] * 11
    with pytest.raises(ValueError, match="expected an extra of trackway, got 'tool'"):
        missing_packages("tool")


def test_little_memory_and_little_room_are_told_with_numbers(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "DISK_GB", 1e9)
    examination = examined(tmp_path, min_memory_gb=1e6)

    assert found(examination, "memory").remedy == "close other programs until 1000000 GB are free"
    assert found(examination, f"disk of {tmp_path}").remedy.startswith("make room until 1000000000 GB are free")


def test_without_bubblewrap_the_python_tool_is_named_and_the_demo_can_run(tmp_path: Path):
    examination = examined(tmp_path)  # the suite hides bwrap from tests that are not marked with it

    bubblewrap = found(examination, "bubblewrap")
    assert bubblewrap.found == "code cannot be isolated: expected bubblewrap (`bwrap`) on PATH, got none"
    assert bubblewrap.remedy.startswith("`apt-get install bubblewrap`") and not bubblewrap.demo
    assert examination.demo


@pytest.mark.program("bwrap")
def test_bubblewrap_is_tried(tmp_path: Path):
    assert found(examined(tmp_path), "bubblewrap").found == "isolates the code of the tool `python`"


@pytest.mark.parametrize(
    ("platform", "said"), [("darwin", "darwin has no namespaces"), ("linux", "code cannot be isolated")]
)
def test_another_system_than_linux_lacks_the_sandbox_only(platform: str, said: str, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(doctor.sys, "platform", platform)

    assert said in found(examined(tmp_path), "bubblewrap").found


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("qwen", ""),
        ("gemma", "one that leaves out the schemas of tools and rejects the results of tools (Conversation roles"),
        ("phi3", "one that leaves out the schemas of tools and leaves out the results of tools"),
    ],
)
def test_a_model_whose_template_shows_no_tools_is_refused_with_the_remedy(
    family: str, says: str, monkeypatch, tmp_path: Path
):
    model = tmp_path / "model"
    FAMILIES[family].tokenizer().save_pretrained(model)
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")

    result = command(monkeypatch, tmp_path, "--json", "--model-path", str(model))
    template = found(Examination.model_validate(json.loads(result.stdout)), "chat template")
    assert (template.ok, result.exit_code) == (not says, 1 if says else 0)
    assert says in template.found
    assert template.remedy.startswith("give the tokenizer a template with tools") == bool(says)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path):
    template = found(examined(tmp_path, model_path=tmp_path), "chat template")
    assert (template.ok, template.found, template.remedy) == (
        False,
        f"actor_rollout_ref.model.path: expected a Hugging Face model in {tmp_path}, got a folder without config.json "
        "and *.safetensors",
        "correct the path",
    )


def test_without_the_packages_that_read_a_template_none_is_read(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "missing_packages", lambda extra: ["transformers"])

    assert found(examined(tmp_path), "chat template").found == "not read: needs trackway[trainer]"


def test_without_torch_nothing_imports_it(tmp_path: Path):
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from importlib import metadata\n"
        "version = metadata.version\n"
        "def without(name):\n"
        "    if name == 'torch': raise metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "metadata.version = without\n"
        "from trackway.deploy.cli import main; main()"
    )
    words = [sys.executable, "-c", program, "doctor", "--json"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)

    torch = next(finding for finding in json.loads(ended.stdout)["findings"] if finding["name"] == "torch and GPU")
    assert torch["found"] == "no torch: needed by rollout and trainer only"
