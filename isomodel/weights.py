"""Weights in Hugging Face's layout: safetensors folders in and out, one table of names for each model family."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from isomodel import device_memory
from isomodel.atomic import new_folder
from isomodel.config import FaultyInput, ModelConfig, read_json_object
from isomodel.specs import Params, weight_specs

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
FLOATS = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
"""dtypes that weights may have in a file, by their safetensors name."""


class WeightsError(FaultyInput):
    """Weights that cannot be used; the message lists every fault."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a Hugging Face tensor lies in one of our weights.

    Attributes:
      weight: name in `weight_specs`.
      index: index of it in one layer's array (in the whole array where nothing is stacked).
      in_dims: trailing dimensions there that are the columns of the Hugging Face matrix [out, in]; the others are its
        rows. A vector is itself.
    """

    weight: str
    index: tuple = ()
    in_dims: int = 1


# Names of modeling_llama.py in transformers. qkv is grouped by KV head: [K, G + 2, d, D], queries first (specs.py).
LLAMA = {
    "model.embed_tokens.weight": Place("embed"),
    "model.layers.{layer}.input_layernorm.weight": Place("layers.mixer_norm"),
    "model.layers.{layer}.self_attn.q_proj.weight": Place("layers.mixer.qkv", np.s_[:, :-2]),
    "model.layers.{layer}.self_attn.k_proj.weight": Place("layers.mixer.qkv", np.s_[:, -2]),
    "model.layers.{layer}.self_attn.v_proj.weight": Place("layers.mixer.qkv", np.s_[:, -1]),
    "model.layers.{layer}.self_attn.o_proj.weight": Place("layers.mixer.o", in_dims=2),
    "model.layers.{layer}.post_attention_layernorm.weight": Place("layers.mlp_norm"),
    "model.layers.{layer}.mlp.gate_proj.weight": Place("layers.mlp.gate_up", (0,)),
    "model.layers.{layer}.mlp.up_proj.weight": Place("layers.mlp.gate_up", (1,)),
    "model.layers.{layer}.mlp.down_proj.weight": Place("layers.mlp.down"),
    "model.norm.weight": Place("final_norm"),
    "lm_head.weight": Place("lm_head"),
}
QWEN3 = LLAMA | {
    "model.layers.{layer}.self_attn.q_norm.weight": Place("layers.mixer.q_norm"),
    "model.layers.{layer}.self_attn.k_norm.weight": Place("layers.mixer.k_norm"),
}
TABLES = {"llama": LLAMA, "qwen3": QWEN3}

# Buffers that old checkpoints carry although they are computed from the config.
_HARMLESS_EXTRA = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|self_attn\.(masked_)?bias$")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor that is read when needed.

    Attributes:
      shape, dtype: as stored; dtype is a numpy dtype, or the file's own name of one that is not in FLOATS.
      read: its values; a fresh array each time.
      file: where it lies, for messages.
    """

    shape: tuple[int, ...]
    dtype: np.dtype | str
    read: Callable[[], np.ndarray]
    file: str


def load(
    folder: str | Path,
    cfg: ModelConfig | None = None,
    dtype: Any = None,
    *,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> Params:
    """The weights of a Hugging Face folder, as `specs.weight_specs(cfg)` names and shapes them.

    Tensors are read one by one, so the peak is about one model (plus its largest stacked weight on the host).

    Args:
      folder: holds model.safetensors, or model.safetensors.index.json and its shards.
      cfg: None reads the folder's config.json.
      dtype: "bfloat16" or "float32"; one rounding each where that is narrower. None keeps each weight's own.
      shardings: placement of each weight (sharding.weight_shardings); None is the default device.

    Raises:
      OutOfDeviceMemory: the model does not fit on the device.
      WeightsError: missing or damaged files; else missing, extra, wrongly shaped or typed tensors; else NaN or
        infinity. Each lists all its faults at once; nothing is returned.
      ConfigError: the folder's config.json cannot be used.
    """
    folder = Path(folder)
    cfg = ModelConfig.load(folder) if cfg is None else cfg
    return pack(cfg, open_safetensors(folder), dtype, source=str(folder), shardings=shardings)


def save(
    folder: str | Path,
    cfg: ModelConfig,
    params: Params,
    *,
    dtype: Any = None,
    tokenizer: str | Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Writes a Hugging Face folder: config.json, generation_config.json, safetensors; whole or not at all.

    `load` then `save` gives back each tensor's bytes. Tied embeddings are written once.

    Args:
      params: as `weight_specs(cfg)`; sharded arrays are gathered, one weight at a time.
      dtype: "bfloat16" or "float32"; None keeps each weight's.
      tokenizer: folder whose tokenizer files are copied along.
      max_shard_bytes: a larger model is cut into shards of at most this size with an index, in the Hub's naming.
      overwrite: replace a model folder that is there.
      also: called last with the folder, still under its temporary name, to write more files into it.

    Raises:
      WeightsError: missing, extra or wrongly shaped weights, NaN or infinity in them.
      FileExistsError: something is there already and `overwrite` does not cover it.
      FileNotFoundError: `tokenizer` has no tokenizer files.
      OSError: the disk is full, or the place not writable. Nothing is left behind.
    """
    tensors = unpack(cfg, params, dtype)
    copied = [] if tokenizer is None else tokenizer_files(tokenizer)
    with new_folder(folder, overwrite=overwrite) as temporary:
        write_safetensors(temporary, tensors, max_shard_bytes)
        write_json(temporary / "config.json", cfg.to_hf(str(tensors["model.embed_tokens.weight"].dtype)))
        write_json(temporary / "generation_config.json", cfg.to_hf_generation())
        for file in copied:
            shutil.copyfile(file, temporary / file.name)
        if also is not None:
            also(temporary)


def hf_places(cfg: ModelConfig) -> dict[str, tuple[Place, tuple, tuple[int, ...]]]:
    """Of each tensor of `cfg`, by its Hugging Face name: place, index in our whole array, shape at Hugging Face."""
    specs = weight_specs(cfg)
    places = {}
    for layer in [None, *range(cfg.num_layers)]:
        for template, place in TABLES[cfg.family].items():
            if ("{layer}" in template) != (layer is not None) or place.weight not in specs:
                continue
            index = place.index if layer is None else (layer, *place.index)
            inner = np.broadcast_to(0, specs[place.weight].shape)[index].shape
            places[template.format(layer=layer)] = (place, index, _hf_shape(inner, place.in_dims))
    return places


def open_safetensors(folder: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder by name, headers read and checked, values not yet.

    Raises:
      WeightsError: no safetensors, missing or damaged shards, an index that disagrees with them.
    """
    folder = Path(folder)
    faults: list[str] = []
    index: dict[str, str] | None = None
    if (folder / SINGLE).is_file():
        files = [SINGLE]
    elif (folder / INDEX).is_file():
        index = _read_index(folder / INDEX, faults)
        files = sorted(set(index.values()))
    else:
        raise WeightsError(str(folder), [_no_safetensors(folder)])
    tensors: dict[str, StoredTensor] = {}
    unread = set()
    for file in files:
        try:
            found = _open_file(folder / file)
        except WeightsError as e:
            unread.add(file)
            faults += e.faults
            continue
        faults += [f"{name} is in two files: {tensors[name].file} and {file}" for name in found if name in tensors]
        tensors |= found
    for name, file in (index or {}).items():
        if file not in unread and (name not in tensors or tensors[name].file != file):
            faults.append(f"{INDEX} says that {name} is in {file}, where it is not")
    if faults:
        raise WeightsError(str(folder), faults)
    return tensors


def pack(
    cfg: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    dtype: Any = None,
    *,
    source: str,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> Params:
    """Our weights from Hugging Face tensors. Arguments and errors as `load`; `source` names them in messages."""
    places = hf_places(cfg)
    _check_stored(cfg, tensors, places, dtype, source)
    members: dict[str, list[str]] = {}
    for name, (place, _, _) in places.items():
        members.setdefault(place.weight, []).append(name)
    if shardings is None:
        stored = lambda weight: np.dtype(dtype or tensors[members[weight][0]].dtype).itemsize  # noqa: E731
        size = sum(math.prod(spec.shape) * stored(weight) for weight, spec in weight_specs(cfg).items())
        device_memory.require(size, f"{source}: the model", "choose a smaller model, a narrower dtype, or another device")
    params, not_finite = {}, []
    for weight, spec in weight_specs(cfg).items():
        stacked = np.empty(spec.shape, np.dtype(dtype or tensors[members[weight][0]].dtype))
        for name in members[weight]:
            _, index, _ = places[name]
            part = stacked[index]  # a view; () of an array too
            part[...] = tensors[name].read().reshape(part.shape)
            if not _all_finite(part):
                not_finite.append(name)
        if not not_finite:
            params[weight] = jax.device_put(stacked, shardings[weight] if shardings else None)
    if not_finite:
        params.clear()
        raise WeightsError(source, [f"NaN or infinity in {name}" for name in _ranges(not_finite)])
    if cfg.tie_embeddings and "lm_head.weight" in tensors:
        _check_tied(tensors, source)
    return params


def unpack(cfg: ModelConfig, params: Params, dtype: Any = None) -> dict[str, StoredTensor]:
    """Hugging Face tensors of our weights; each is copied out when it is read.

    Raises:
      WeightsError: `params` are not what `weight_specs(cfg)` says; or, on reading one, it has NaN or infinity.
    """
    specs = weight_specs(cfg)
    faults = [f"weight {name} is missing" for name in specs if name not in params]
    faults += [f"weight {name} is not one of this model's" for name in params if name not in specs]
    for name, spec in specs.items():
        if name in params and params[name].shape != spec.shape:
            faults.append(f"weight {name} has shape {params[name].shape}, this model's has {spec.shape}")
        if name in params and np.dtype(params[name].dtype) not in FLOATS.values():
            faults.append(f"weight {name} is {params[name].dtype}; float32, bfloat16 or float16 is expected")
    if faults:
        raise WeightsError("these weights", faults)

    def reader(name: str, place: Place, index: tuple, shape: tuple[int, ...], out: np.dtype):
        def read() -> np.ndarray:
            part = np.asarray(params[place.weight])[index].reshape(shape)
            part = np.ascontiguousarray(part.astype(out, copy=False))
            if not _all_finite(part):
                raise WeightsError("these weights", [f"NaN or infinity in {place.weight} ({name})"])
            return part

        return read

    tensors = {}
    for name, (place, index, shape) in hf_places(cfg).items():
        out = np.dtype(dtype or params[place.weight].dtype)
        tensors[name] = StoredTensor(shape, out, reader(name, place, index, shape, out), "memory")
    return tensors


def write_safetensors(folder: Path, tensors: Mapping[str, StoredTensor], max_shard_bytes: int) -> None:
    """Writes tensors as one file, or as shards with an index; one shard in memory at a time."""
    split = huggingface_hub.split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda t: math.prod(t.shape) * t.dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        arrays = {name: tensors[name].read() for name in names}
        try:
            safetensors.numpy.save_file(arrays, folder / file, metadata={"format": "pt"})
        except safetensors.SafetensorError as e:
            raise OSError(_errno(e), str(e)) from e
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors makes files that only the owner can read
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        write_json(folder / INDEX, index)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def tokenizer_files(folder: str | Path) -> list[Path]:
    """The tokenizer files of a model folder.

    Raises:
      FileNotFoundError: there are none.
    """
    files = [Path(folder) / name for name in TOKENIZER_FILES]
    files = [file for file in files if file.is_file()]
    if not files:
        raise FileNotFoundError(f"{folder} has no tokenizer files (such as tokenizer.json)")
    return files


def _hf_shape(inner: tuple[int, ...], in_dims: int) -> tuple[int, ...]:
    if len(inner) == 1:
        return inner
    return (math.prod(inner[:-in_dims]), math.prod(inner[-in_dims:]))


def _read_index(path: Path, faults: list[str]) -> dict[str, str]:
    """weight_map of an index: tensor name -> file of the same folder."""
    index = read_json_object(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise WeightsError(str(path), ["it has no weight_map"])
    bad = sorted({str(f) for f in index.values() if not isinstance(f, str) or f in ("", "..") or Path(f).name != f})
    if bad:
        raise WeightsError(str(path), [f"weight_map names {file!r}, not a file of this folder" for file in bad])
    return index


def _open_file(path: Path) -> dict[str, StoredTensor]:
    if not path.is_file():
        raise WeightsError(str(path), [f"{path.name} is missing; download it again"])
    try:
        file = safetensors.safe_open(path, framework="np")
        views = {name: file.get_slice(name) for name in file.keys()}
    except (safetensors.SafetensorError, OSError) as e:
        size = path.stat().st_size
        raise WeightsError(
            str(path), [f"{path.name} is damaged or truncated ({size} bytes: {e}); download or copy it again"]
        ) from e
    return {
        name: StoredTensor(
            tuple(view.get_shape()),
            FLOATS.get(view.get_dtype(), view.get_dtype()),
            lambda name=name: file.get_tensor(name),
            path.name,
        )
        for name, view in views.items()
    }


def _no_safetensors(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return f"it has PyTorch .bin files and no {SINGLE}; convert them to safetensors first"
    if any(folder.glob("*.gguf")):
        return f"it has a GGUF file and no {SINGLE}; run `isomodel convert FILE.gguf FOLDER` first"
    return f"it has neither {SINGLE} nor {INDEX}"


def _check_stored(
    cfg: ModelConfig, tensors: Mapping[str, StoredTensor], places: Mapping, dtype: Any, source: str
) -> None:
    """Raises a WeightsError with every fault that names, shapes and dtypes show."""
    allowed = {"lm_head.weight"} if cfg.tie_embeddings else set()
    missing = [name for name in places if name not in tensors]
    extra = [n for n in tensors if n not in places and n not in allowed and not _HARMLESS_EXTRA.search(n)]
    faults = [f"missing: {name}" for name in _ranges(missing)] + [f"not expected: {name}" for name in _ranges(extra)]
    first: dict[str, str] = {}
    for name, (place, _, shape) in places.items():
        if name not in tensors:
            continue
        stored = tensors[name]
        if stored.shape != shape:
            faults.append(f"wrong shape: {name} is {list(stored.shape)}, config.json makes it {list(shape)}")
        if stored.dtype not in FLOATS.values():
            faults.append(f"wrong dtype: {name} is {stored.dtype}; supported: {', '.join(FLOATS)}")
            continue
        other = first.setdefault(place.weight, name)
        if dtype is None and tensors[other].dtype != stored.dtype:
            faults.append(
                f"wrong dtype: {name} is {stored.dtype} and {other}, stacked with it, {tensors[other].dtype}; "
                "name the dtype to load"
            )
    if faults:
        raise WeightsError(source, faults)


def _check_tied(tensors: Mapping[str, StoredTensor], source: str) -> None:
    """Some tied checkpoints carry the head as well: it must be the embedding, or the file contradicts its config."""
    head, embed = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    same = head.shape == embed.shape and head.dtype == embed.dtype
    if not (same and np.array_equal(head.read().view(np.uint8), embed.read().view(np.uint8))):
        fault = "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight"
        raise WeightsError(source, [fault + "; set tie_word_embeddings to false to use it"])


def _all_finite(array: np.ndarray) -> bool:
    """No NaN or infinity: no value has all exponent bits set."""
    bits, exponent = {2: (np.uint16, 0x7F80), 4: (np.uint32, 0x7F800000)}[array.dtype.itemsize]
    if array.dtype == np.float16:
        exponent = 0x7C00
    return not np.any((array.view(bits) & bits(exponent)) == bits(exponent))


def _ranges(names: Iterable[str]) -> list[str]:
    """Names with runs of layers folded: model.layers.{0-29}.x."""
    runs: dict[str, list[int]] = {}
    for name in names:
        layer = re.search(r"\.layers\.(\d+)\.", name)
        key = name if layer is None else name[: layer.start(1)] + "{}" + name[layer.end(1) :]
        runs.setdefault(key, []).extend([int(layer[1])] if layer else [])
    folded = []
    for key, layers in runs.items():
        layers = sorted(layers)
        starts = [i for i in layers if i - 1 not in layers]
        ends = [i for i in layers if i + 1 not in layers]
        spans = [str(a) if a == b else f"{{{a}-{b}}}" for a, b in zip(starts, ends)]
        folded += [key.replace("{}", span, 1) for span in spans] or [key]
    return folded


def _errno(e: Exception) -> int:
    """The number in safetensors' message "I/O error: No space left on device (os error 28)"."""
    found = re.search(r"os error (\d+)", str(e))
    return int(found[1]) if found else 5
