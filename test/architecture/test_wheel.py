"""The wheels hold the tree: nothing is left out, nothing slips in."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tree
from tree import ROOT

HOST_CPU = ROOT / "platforms/host_cpu"
DISTRIBUTIONS = {
    "sglang-rfork": (ROOT, {"rfork": ROOT / "python/rfork", "sglang_rfork": ROOT / "python/sglang"}),
    "sglang-host-cpu": (HOST_CPU, {"sglang_host_cpu": HOST_CPU / "sglang_host_cpu"}),
}


Built = tuple[Path, dict[str, bytes]]


@pytest.fixture(scope="module", params=DISTRIBUTIONS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build a wheel from a copy, so that the tree stays as it is; return it with the files that it should hold.

    Ours is built from what its images are built from: that is enough.
    """
    source, packages = DISTRIBUTIONS[request.param]
    copy = tmp_path_factory.mktemp("source")
    expected = {}
    for path in tree.files():
        if path.is_relative_to(source) and (source != ROOT or tree.travels(path)):
            target = copy / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        for name, folder in packages.items():
            if path.is_relative_to(folder):
                expected[(Path(name) / path.relative_to(folder)).as_posix()] = target.read_bytes()
    wheels = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels, copy]
    subprocess.run(command, check=True)
    (wheel,) = wheels.glob("*.whl")
    return wheel, expected


def test_wheel_and_tree_hold_the_same_files(built: Built) -> None:
    wheel, expected = built
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")]
        packed = {name: archive.read(name) for name in files}
    assert sorted(packed) == sorted(expected)
    assert packed == expected


def test_wheel_brings_its_licence_and_entry_points(built: Built) -> None:
    with zipfile.ZipFile(built[0]) as archive:
        (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "[sglang.srt.plugins]" in archive.read(entry_points).decode()
        assert [name for name in archive.namelist() if "LICENSE" in name]


def test_the_patch_set_refuses_to_be_taken_for_sglang(tmp_path: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'python')!r}); import sglang"
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert run.returncode == 1
    assert "is R-Fork's patch set" in run.stderr
