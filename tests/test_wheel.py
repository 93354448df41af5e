"""A wheel has every file of the packages: templates, scenarios and the assets of pages, not modules alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("bamboo", "bamboo_cli", "engine", "scenarios")


def test_a_wheel_has_every_file_of_the_packages(tmp_path: Path) -> None:
    source = tmp_path / "source"  # building writes beside its sources
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir"]
    wanted = {path.relative_to(source).as_posix() for each in PACKAGES for path in (source / each).rglob("*.*")}
    subprocess.run([sys.executable, *build, str(tmp_path), str(source)], check=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {each.replace("engine/scenarios/", "scenarios/") for each in zipfile.ZipFile(wheel).namelist()}
    assert len(wanted) > 300 and sorted(wanted - packed) == []
