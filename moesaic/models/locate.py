"""The folder of a model: one that is named, generated or in the Hub's cache, with a changed config
if that is asked for. Nothing is downloaded."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from moesaic.config import ServerArgs
from moesaic.config.flags import json_object
from moesaic.models.config import CHECKPOINT_LAYERS
from moesaic.models.folder import read_object
from moesaic.models.generated import cached_folder
from moesaic.models.tiny import materialise

HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def model_folder(args: ServerArgs) -> str:
    """The folder of --model-path; ValueError if the Hub's cache has no such model or revision."""
    return changed_folder(args, own_folder(args))


def changed_folder(args: ServerArgs, folder: str) -> str:
    """The model's own folder, or one with the changes of --json-model-override-args."""
    if changes := json_object(args, "json_model_override_args"):
        return _with_changes(Path(folder), changes)
    return folder


def own_folder(args: ServerArgs) -> str:
    """The folder of --model-path without the changes of --json-model-override-args."""
    return _Hub(_hub_root(args), args.revision).folder(args.model_path)


def tokenizer_folder(args: ServerArgs, model: str) -> str | None:
    """The folder of --tokenizer-path, which is `model` unless another one is named."""
    if args.tokenizer_path is None or args.tokenizer_path == args.model_path:
        return model if args.tokenizer_path else None
    return _Hub(_hub_root(args), None).folder(args.tokenizer_path)


def with_local_folders(args: ServerArgs, folder: str) -> ServerArgs:
    """The same with folders in the place of names, which is served by its name still. `folder`: the
    model's."""
    hub = _Hub(_hub_root(args), None)
    draft, tokens = args.speculative_draft_model_path, args.speculative_token_map
    return replace(
        args,
        model_path=folder,
        served_model_name=args.served_model_name or args.model_path,
        tokenizer_path=tokenizer_folder(args, folder),
        speculative_draft_model_path=None if draft is None else hub.folder(draft),
        speculative_token_map=None if tokens is None else hub.file(tokens),
    )


def with_own_folder(args: ServerArgs, given: ServerArgs, folder: str) -> ServerArgs:
    """`args` with the model's own folder in the place of one with a changed config."""
    if folder == args.model_path:
        return args
    return replace(args, model_path=folder, tokenizer_path=tokenizer_folder(given, folder))


def _hub_root(args: ServerArgs) -> Path:
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(args.download_dir or os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


@dataclass(frozen=True)
class _Hub:
    """The cache of huggingface_hub: models--ORG--NAME/snapshots/COMMIT, and the commits of branches
    and tags in refs."""

    root: Path
    revision: str | None

    def folder(self, name: str) -> str:
        if Path(name).exists() or not HUB_ID.fullmatch(name):
            if self.revision is not None:
                raise ValueError(
                    f"--revision {self.revision} chooses a version in the Hub's cache, and {name} "
                    "is not from there: leave it out"
                )
            return materialise(name)
        return str(self._snapshot(name))

    def file(self, name: str) -> str:
        """A file that exists, or ORG/NAME/FILE of the cache."""
        model = os.path.dirname(name)
        if Path(name).exists() or not HUB_ID.fullmatch(model):
            return name
        return str(self._snapshot(model) / os.path.basename(name))

    def _snapshot(self, name: str) -> Path:
        revision = self.revision or "main"
        model = self.root / f"models--{name.replace('/', '--')}"
        ref = model / "refs" / revision
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
        snapshot = model / "snapshots" / commit
        if not snapshot.is_dir():
            wanted = f" --revision {revision}" if self.revision else ""
            raise ValueError(
                f"{name} is neither a folder nor in {self.root}{wanted and ' at ' + revision}, and "
                f"nothing is downloaded: run hf download {name}{wanted}, or give a folder"
            )
        return snapshot


def _with_changes(folder: Path, changes: dict[str, Any]) -> str:
    """A folder of links to the files of another, with changes in config.json."""
    given = read_object(folder / "config.json")
    config = given | changes
    if "num_hidden_layers" in changes and "num_hidden_layers" in given:
        config[CHECKPOINT_LAYERS] = given["num_hidden_layers"]
    text = json.dumps(config, indent=2)
    files = {path.name: path.absolute() for path in sorted(folder.iterdir())}
    stamps = [(str(path), path.stat().st_mtime_ns) for path in files.values()]

    def make(changed: Path) -> None:
        changed.mkdir()
        (changed / "config.json").write_text(text, encoding="utf-8")
        for name, path in files.items():
            if name != "config.json":
                (changed / name).symlink_to(path)

    return str(cached_folder("changed", f"{text}{stamps}".encode(), make))
