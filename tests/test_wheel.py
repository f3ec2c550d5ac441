"""The wheel, used outside the clone: it brings the embedded model, the prompts, the known failures and the plugin."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that holds just what the wheel unpacks to."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=REPO, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def outside(site, folder, *command):
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    environment.pop("COLUMNS", None)
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_compare_runs_on_what_the_wheel_brings(site, tmp_path):
    where = outside(site, tmp_path, "-c", "import ddtree_check; print(ddtree_check.__file__)")
    assert where.stdout.startswith(str(site))
    done = outside(site, tmp_path, "-m", "ddtree_check", "compare", "--limit", "1", "--budget", "4")
    assert done.returncode == 0, done.stderr
    assert "model tiny-qwen3_5" in done.stdout and done.stdout.rstrip().endswith("exit code 0")


def test_the_wheel_holds_no_more_than_it_needs(site):
    held = {
        path.relative_to(site / "ddtree_check" / "_fixtures").parts[0] for path in site.glob("ddtree_check/_fixtures/*")
    }
    assert held == {"models", "prompts", "known_failures.toml"}
    models = sorted(path.name for path in (site / "ddtree_check" / "_fixtures" / "models").iterdir())
    assert models == ["tiny-dflash", "tiny-qwen3_5"]
    assert not list(site.glob("tests")) and not list(site.glob("fixtures"))
    assert (site / "ddtree_check" / "py.typed").is_file()
    (entries,) = site.glob("*.dist-info/entry_points.txt")
    assert "ddtree_check.pytest_plugin" in entries.read_text() and "ddtree_check.__main__:main" in entries.read_text()
    assert "ddtree_check.engines.sglang.recorder:sglang_plugin" in entries.read_text().split("[sglang.srt.plugins]")[1]


def test_a_package_without_its_fixtures_says_so(site, tmp_path):
    code = "from pathlib import Path\nfrom ddtree_check.base.resources import fixtures_dir as f\nf(Path('nowhere/x'))"
    done = outside(site, tmp_path, "-c", code)
    assert done.returncode == 1 and "reinstall ddtree-check" in done.stderr


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-kernels.txt"])
def test_every_pinned_package_has_hashes(name):
    """Installed with --require-hashes, a file of other bytes is refused."""
    text = (REPO / name).read_text().replace("\\\n", " ")
    pins = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert pins and all("==" in pin and "--hash=sha256:" in pin for pin in pins)
    assert "--require-hashes --no-deps -r constraints.txt" in (REPO / "Makefile").read_text()
