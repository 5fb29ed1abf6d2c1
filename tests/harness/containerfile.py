"""deploy/Containerfile, read and carried out in roots on this machine: no image is built.

A stage is a folder that begins as a copy of the stage that it is made from. RUN runs in it by
chroot, COPY copies into it. What a builder does besides (layers, caches, labels) is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

MIRROR = os.environ.get("MEGASCALE_TEST_DEBIAN", "http://deb.debian.org/debian")
STEP_TIMEOUT_S = 560
_KNOWN = frozenset({"ARG", "FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT"})


@dataclass(slots=True)
class Stage:
    """One FROM with the instructions that follow it."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def parse(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """Arguments before the first stage, and the stages by name.

    Raises:
        ValueError: an instruction that :class:`Builder` does not carry out.
    """
    joined = re.sub(r"\\\n", "", re.sub(r"(?m)^\s*#.*\n", "", text))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        if word not in _KNOWN:
            raise ValueError(f"{word} is not known here: {line}")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = stages[name] = Stage(name, base)
        elif current is None:
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            current.steps.append((word, rest.strip()))
    return arguments, stages


@dataclass(slots=True)
class Built:
    """A stage's root with what its processes get."""

    root: Path
    variables: dict[str, str]
    user: str = "0:0"
    folder: str = "/"
    entry: tuple[str, ...] = ()


class Builder:
    """Carries out stages below ``folder``; files to copy come from ``context``."""

    def __init__(
        self, folder: Path, context: Path, text: str, arguments: Mapping[str, str]
    ) -> None:
        self._folder, self._context = folder, context
        defaults, self._stages = parse(text)
        self._arguments = {**defaults, **arguments}
        self._built: dict[str, Built] = {}
        # In /tmp, which is new for each command: a package may own the path that a file has here.
        self._pip, self._from_host = relocated(pip_settings())

    def build(self, name: str) -> Built:
        """The stage called ``name``, with all that it needs."""
        if name in self._built:
            return self._built[name]
        stage = self._stages[name]
        root = self._folder / name
        if stage.base in self._stages:
            parent = self.build(stage.base)
            _run(["cp", "--archive", "--reflink=auto", str(parent.root), str(root)])
            built = Built(root, dict(parent.variables))
        else:
            make_debian(root, self._filled(stage.base, {}))
            built = Built(root, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
        arguments: dict[str, str] = {}
        for word, rest in stage.steps:
            self._do(built, word, rest, arguments)
        self._built[name] = built
        return built

    def _do(self, built: Built, word: str, rest: str, arguments: dict[str, str]) -> None:
        if word == "ARG":
            name, _, default = rest.partition("=")
            arguments[name] = self._arguments.get(name, default)
        elif word == "ENV":
            name, _, value = rest.partition("=")
            built.variables[name] = value.strip('"')
        elif word == "USER":
            built.user = rest
        elif word == "WORKDIR":
            built.folder = rest
        elif word == "ENTRYPOINT":
            built.entry = tuple(json.loads(rest))
        elif word == "COPY":
            self._copy(built, rest)
        else:
            command = ["/bin/sh", "-c", self._filled(rest, arguments)]
            done = self.run(built, command, as_root=built.user == "0:0")
            assert done.returncode == 0, f"RUN {rest}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"

    def _filled(self, text: str, arguments: Mapping[str, str]) -> str:
        """``text`` with the arguments of the file; other variables are the shell's."""
        known = {**self._arguments, **arguments}
        return re.sub(r"\$\{(\w+)\}", lambda m: known.get(m[1], m[0]), text)

    def _copy(self, built: Built, rest: str) -> None:
        *sources, target = rest.split()
        context = self._context
        if sources[0].startswith("--from="):
            context = self.build(sources.pop(0).removeprefix("--from=")).root
        place = built.root / target.lstrip("/")
        for source in sources:
            found = context / source.lstrip("/")
            if found.is_dir():
                shutil.copytree(
                    found, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, place)

    def run(
        self, built: Built, command: list[str], *, as_root: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """A command in the stage's root, as its user, with /proc, /dev/shm and this network."""
        user = "0:0" if as_root else built.user
        variables = {**built.variables, **self._pip, "DEBIAN_FRONTEND": "noninteractive"}
        if not as_root:
            variables["HOME"] = built.folder
        words = " ".join(f"{name}={_quoted(value)}" for name, value in variables.items())
        shell = f"cd {built.folder if not as_root else '/'} && exec " + " ".join(
            map(_quoted, command)
        )
        chroot = f"exec env -i {words} chroot --userspec={user} . /bin/sh -c {_quoted(shell)}"
        script = "\n".join(["set -e", *self._mounts(), chroot])
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", script],
            cwd=built.root,
            capture_output=True,
            text=True,
            check=False,
            timeout=STEP_TIMEOUT_S,
        )

    def _mounts(self) -> Iterator[str]:
        """Commands that mount what a container runtime gives; they end with the namespace."""
        yield "mount --make-rprivate /"
        yield "mount -t proc proc proc"
        yield "mount -t tmpfs -o mode=755 dev dev"
        for device in ("null", "zero", "full", "random", "urandom"):
            yield f"touch dev/{device} && mount --bind /dev/{device} dev/{device}"
        yield "mkdir -p dev/shm && mount -t tmpfs -o mode=1777 shm dev/shm"
        yield "mount -t tmpfs -o mode=1777 tmp tmp"
        for name in ("resolv.conf", "hosts"):
            yield f"touch etc/{name} && mount --bind /etc/{name} etc/{name}"
        for path, inside in self._from_host.items():
            make = f"mkdir -p {inside}" if path.is_dir() else f"touch {inside}"
            yield f"[ -e {inside} ] || {make}"
            yield f"mount --bind {_quoted(str(path))} {inside}"


def make_debian(root: Path, image: str) -> None:
    """A minimal Debian at ``root``, in place of the image ``debian:SUITE-slim``."""
    match = re.fullmatch(r"debian:(\w+)-slim", image)
    assert match is not None, f"{image} is no image of Debian"
    _run(["mmdebstrap", "--variant=minbase", match[1], str(root), MIRROR])


def pip_settings() -> dict[str, str]:
    """This machine's settings of pip, as variables for another root."""
    found = subprocess.run(
        ["python3", "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    settings: dict[str, str] = {}
    for line in found.stdout.splitlines():
        name, _, value = line.partition("=")
        scope, _, option = name.partition(".")
        if scope in ("global", "install", ":env:"):
            variable = "PIP_" + option.upper().replace("-", "_")
            settings[variable] = value.strip("'\"").replace("\\n", " ")
    return settings


def relocated(settings: Mapping[str, str]) -> tuple[dict[str, str], dict[Path, str]]:
    """The settings with files of this machine at places in /tmp, and those places by file."""
    places: dict[Path, str] = {}

    def moved(word: str) -> str:
        path = Path(unquote(urlsplit(word).path)) if word.startswith("file:") else Path(word)
        if not word.startswith(("/", "file:")) or not path.exists():
            return word
        # An index of files links to the files beside it.
        base = path.parent if path.name == "simple" else path
        place = places.setdefault(base, f"tmp/host-{len(places)}")
        inside = Path("/", place) / path.relative_to(base)
        return inside.as_uri() if word.startswith("file:") else str(inside)

    found = {
        name: " ".join(moved(word) for word in value.split()) for name, value in settings.items()
    }
    return found, places


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=STEP_TIMEOUT_S
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder for roots, which are removed: they are gigabytes."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        _run(["rm", "--recursive", "--force", "--one-file-system", str(folder)])
