"""The model directory: is it whole, can it be trained, is it the recipe's model, and do its parts agree?"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes import checkpoint
from recipes.doctor.lines import Line, Section, shown
from recipes.doctor.node import Node
from recipes.params import flatten

SECTION = Section("model")

# What a loader can train from: verl casts floating weights, and nothing turns quantised ones back.
TRAINABLE = {"F64", "F32", "F16", "BF16"}

# A JSON file of a model that is larger than this is no config; a tokenizer.json of 150,000 entries has 10 MB.
LARGEST_JSON = 100 * 2**20


def look(node: Node) -> Iterator[Line]:
    """Yield what is to be said of the model directory. Headers are read, never a tensor."""
    if node.subject is None:
        yield SECTION.unseen("model", "no recipe names one")
        return
    name = node.subject.recipe.model.path
    path = Path(name)
    if not path.is_dir():
        if path.is_absolute() or name.startswith("."):
            made = node.subject.recipe.prepare
            yield SECTION.fault(
                "directory",
                {"model.path": name},
                "there is no such directory on this node.",
                "`recipes prepare` makes it." if made else "Put the model there, or set model.path.",
                noticed="engine start",
                source="transformers",
            )
        else:
            yield SECTION.unseen("directory", f"model.path={name} is no folder here, so it is fetched at start")
        return
    found = checkpoint.read(path)
    yield from _whole(found)
    yield from _trainable(found)
    yield from _the_recipe_s(node, found.config)
    yield from _mtp(node, found)
    yield from _end_of_text(path, found.config)
    yield from _tokenizer(path)


def _whole(found: checkpoint.Checkpoint) -> Iterator[Line]:
    stray = [f for f in found.faults if f.kind == "stray file"]
    broken = [f for f in found.faults if f.kind != "stray file"]
    for kind, count in Counter(f.kind for f in broken).items():
        first = next(f for f in broken if f.kind == kind)
        yield SECTION.fault(
            "shards",
            {"model.path": found.path},
            f"{first.reason.rstrip('.')}{f' ({count} such faults)' if count > 1 else ''}.",
            "Fetch the model again.",
            noticed="engine start",
            source="safetensors",
        )
    if stray:
        yield SECTION.fault(
            "shards",
            {"model.path": found.path},
            f"{stray[0].reason.rstrip('.')}{f' ({len(stray)} such files)' if len(stray) > 1 else ''}.",
            "Take it away if it is left over from another fetch.",
            severity="warning",
            noticed="never",
            source="safetensors",
        )
    if not found.config:
        yield SECTION.fault(
            "config",
            {"model.path": found.path},
            "the directory has no config.json that can be read.",
            "Point model.path at a Hugging Face checkpoint.",
            noticed="engine start",
            source="transformers",
        )
    if not found.tensors and not broken:
        yield SECTION.fault(
            "shards",
            {"model.path": found.path},
            "the directory has no weights (*.safetensors).",
            "Fetch or build the model.",
            noticed="engine start",
            source="safetensors",
        )
    elif found.tensors and not broken:
        yield SECTION.ok("shards", f"{len(found.files)} files, {len(found.tensors)} tensors, all there and whole")


def _trainable(found: checkpoint.Checkpoint) -> Iterator[Line]:
    quantised = found.config.get("quantization_config")
    dtypes = Counter(t.dtype for t in found.tensors.values())
    odd = sorted(set(dtypes) - TRAINABLE)
    if quantised or odd:
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, Mapping) else "unnamed"
        keys: dict[str, Any] = {"model.path": found.path}
        keys |= {"quantization_config": method} if quantised else {}
        keys |= {"dtypes": ", ".join(odd)} if odd else {}
        yield SECTION.fault(
            "dtype",
            keys,
            "these weights are quantised, and a quantised checkpoint cannot be trained.",
            "Take the bf16 release of the model, or convert it back first.",
            noticed="model build: shapes or dtypes that do not fit, or noise as weights",
            source="config.json and the shards' headers",
        )
    elif dtypes:
        declared = found.config.get("dtype") or found.config.get("torch_dtype") or "nothing"
        held = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
        yield SECTION.ok("dtype", f"tensors: {held}; config.json declares {declared}")
    else:
        yield SECTION.unseen("dtype", "no tensor could be read")


def _the_recipe_s(node: Node, config: Mapping[str, Any]) -> Iterator[Line]:
    if not config:
        return
    facts, text = node.subject.model, config.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    wanted = {"num_hidden_layers": facts.layers, "hidden_size": facts.hidden, "vocab_size": facts.vocab}
    told = {key: config.get(key, text.get(key)) for key in wanted}
    other = {key: told[key] for key in wanted if told[key] is not None and told[key] != wanted[key]}
    if other:
        says = ", ".join(f"{key} {wanted[key]}" for key in other)
        yield SECTION.fault(
            "architecture",
            {"model.name": facts.name, **other},
            f"config.json is of another model: {facts.name} has {says}.",
            "Point model.path at that model, or set model.name to the facts of this one.",
            noticed="model build, or never: the layout was checked for another model",
            source="params/models",
        )
    elif None in told.values():
        missing = ", ".join(key for key, value in told.items() if value is None)
        yield SECTION.unseen("architecture", f"config.json does not say {missing}")
    else:
        yield SECTION.ok("architecture", f"layers, width and vocabulary of {facts.name}")


def _mtp(node: Node, found: checkpoint.Checkpoint) -> Iterator[Line]:
    declared = found.config.get("num_nextn_predict_layers")
    if not isinstance(declared, int) or isinstance(declared, bool) or declared < 1 or not found.tensors:
        return
    held = sum(checkpoint.is_mtp(name, found.config) for name in found.tensors)
    if held:
        yield SECTION.ok("MTP", f"{held} tensors of {declared} multi-token-prediction layers")
        return
    trained = str(dict(flatten(node.subject.recipe.verl)).get("actor_rollout_ref.model.mtp.enable", False)).lower()
    yield SECTION.fault(
        "MTP",
        {"num_nextn_predict_layers": declared},
        "config.json declares multi-token-prediction layers, and the shards hold no tensor of them.",
        "Fetch the whole model, or set the key in config.json to 0.",
        severity="error" if trained == "true" else "warning",
        noticed="model build, or the rollout's speculative decoding",
        source="config.json and the index",
    )


# ------------------------------------------------------------------------------------------------------- end of text


def _end_of_text(path: Path, config: Mapping[str, Any]) -> Iterator[Line]:
    generation, tokenizer = _json(path / "generation_config.json"), _tokenizer_eos(path)
    text = config.get("text_config")
    declared = _ids(config.get("eos_token_id")) or _ids(text.get("eos_token_id") if isinstance(text, Mapping) else None)
    generating = _ids(generation.get("eos_token_id"))
    told = {"config.json": declared, "generation_config.json": generating, "tokenizer": tokenizer}
    known = {name: ids for name, ids in told.items() if ids}
    if len(known) < 2:
        silent = ", ".join(name for name in told if name not in known)
        yield SECTION.unseen("end of text", f"{silent} do not name an eos token, so nothing can be compared")
        return
    words = "; ".join(f"{name} {', '.join(map(str, sorted(ids)))}" for name, ids in known.items())
    # Generation may stop at more tokens than the tokenizer's one; what it must not do is miss that one.
    stops = generating or declared
    lost = sorted((tokenizer or declared) - stops)
    if lost:
        yield SECTION.fault(
            "end of text",
            {"eos_token_id": words},
            f"the rollout does not stop at {', '.join(map(str, lost))}, which ends a message elsewhere.",
            "Make generation_config.json name every eos token of the tokenizer and the chat template.",
            severity="error" if not stops & (tokenizer | declared) else "warning",
            noticed="never: responses run to their longest length",
            source="config.json, generation_config.json, tokenizer_config.json",
        )
    else:
        yield SECTION.ok("end of text", f"they agree: {words}")


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {v for v in values if isinstance(v, int) and not isinstance(v, bool)}


def _tokenizer_eos(path: Path) -> set[int]:
    """The id of the tokenizer's eos token: its text stands in tokenizer_config.json, its id beside the added tokens."""
    settings, whole = _json(path / "tokenizer_config.json"), _json(path / "tokenizer.json")
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(token, str):
        return set()
    for entry in whole.get("added_tokens") or []:
        if isinstance(entry, Mapping) and entry.get("content") == token:
            return _ids(entry.get("id"))
    decoder = settings.get("added_tokens_decoder")
    for number, entry in decoder.items() if isinstance(decoder, Mapping) else ():
        if isinstance(entry, Mapping) and entry.get("content") == token and re.fullmatch(r"\d{1,9}", number):
            return {int(number)}
    model = whole.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    return _ids(vocabulary.get(token)) if isinstance(vocabulary, Mapping) else set()


def _tokenizer(path: Path) -> Iterator[Line]:
    files = [name for name in ("tokenizer.json", "tokenizer.model", "vocab.json") if (path / name).is_file()]
    if not files:
        yield SECTION.fault(
            "tokenizer",
            {"model.path": path},
            "the directory has no tokenizer (tokenizer.json, tokenizer.model or vocab.json).",
            "Fetch the tokenizer's files too.",
            noticed="engine start",
            source="transformers",
        )
        return
    templates = [path / "chat_template.jinja", path / "chat_template.json"]
    if any(t.is_file() for t in templates) or _json(path / "tokenizer_config.json").get("chat_template"):
        yield SECTION.ok("tokenizer", f"{shown(files[0])} and a chat template")
    else:
        yield SECTION.fault(
            "tokenizer",
            {"model.path": path},
            "it has no chat template, and verl puts every prompt through one.",
            "Take an instruct model, or put a chat_template.jinja beside the tokenizer.",
            noticed="first batch",
            source="verl 0.9.1, RLHFDataset",
        )


def _json(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > LARGEST_JSON:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
