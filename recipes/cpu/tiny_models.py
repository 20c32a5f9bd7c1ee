"""Builds the models a CPU can train: Qwen3, Qwen3-MoE and a GLM-5.2-shaped one, with a tokenizer and a tiny data set.

Every build is deterministic: the same arguments give the same bytes. Command line:

    python -m recipes.cpu.tiny_models {qwen3,qwen3_moe,glm5_2} OUT [--seed 0] [--shards 1|2] [--mtp | --no-mtp]
    python -m recipes.cpu.tiny_models data OUT
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SPECIAL = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|im_start|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
"""verl's token builder looks for <|im_end|> and a newline of its own in a Qwen tokenizer, for <|user|> and
<|observation|> in a GLM one."""

VOCABULARY = 64
"""Words from SPECIAL on; even, so that two tensor-parallel ranks can halve it."""

_SPOKEN = (*SPECIAL, "<unk>", "\n", "user", "assistant", "system", "say", *map(str, range(10)))
WORDS = (*_SPOKEN, *(f"w{place}" for place in range(len(_SPOKEN), VOCABULARY)))
"""The vocabulary is full: an id without a word could be sampled and not decoded."""

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' + message['content'] }}<|im_end|>{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
_GLM_CHAT = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

MAX_POSITIONS = 512
_RECIPE = "tiny_model.json"

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    # Ten times the usual 0.02: attention and experts then change the logits by much more than rounding does, and a
    # wrong rotary embedding cannot pass for agreement.
    "initializer_range": 0.2,
}
_QWEN3 = _COMMON | {"num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
_GLM = (
    _COMMON
    | _EXPERTS
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse"],
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "rms_norm_eps": 1e-6,  # of the norms fixed at 1e-6 in transformers' indexer
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "index_topk": MAX_POSITIONS,  # every token is chosen: Megatron and transformers break ties differently
        "index_head_dim": 32,
        "index_n_heads": 2,
        "indexer_types": ["full", "full"],  # Megatron-Bridge 0.5 builds an indexer in every layer
        "num_nextn_predict_layers": 1,
    }
)


NAMES = ("qwen3", "qwen3_moe", "glm5_2")


def _config(name: str):
    from transformers import GlmMoeDsaConfig, Qwen3Config, Qwen3MoeConfig

    match name:
        case "qwen3":
            return Qwen3Config(**_QWEN3)
        case "qwen3_moe":
            return Qwen3MoeConfig(**_QWEN3, **_EXPERTS, num_experts=4)
        case "glm5_2":
            return GlmMoeDsaConfig(**_GLM)
    raise AssertionError(name)


def tiny_model(name: str, out: str | Path, seed: int = 0, shards: int = 1, mtp: bool = True) -> Path:
    """Build model `name` in directory `out` and return it; a complete one that is there already is kept.

    `shards` is the number of weight files, 1 or 2. `mtp` adds the multi-token-prediction layer to glm5_2, as layer
    `num_hidden_layers` of the checkpoint and at its end, where the published checkpoints have it; transformers does not
    load it. Raises ValueError for an unknown name or number of shards, FileExistsError when `out` holds anything else.
    """
    if shards not in (1, 2):
        raise ValueError(f"A tiny model is written in 1 or 2 shards, not {shards}.")
    if name not in NAMES:
        raise ValueError(f"There is no tiny model {name!r}; there are {', '.join(NAMES)}.")
    recipe = {"model": name, "seed": seed, "shards": shards, "mtp": mtp and name == "glm5_2"}
    with _written_whole(Path(out), recipe) as folder:
        if folder is None:
            return Path(out)
        # Every launch looks whether the model is there: torch and transformers would cost it ten seconds.
        import torch
        from transformers import AutoModelForCausalLM

        config = _config(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            # transformers zeroes the pad token's row, and a zero into RMSNorm has a gradient of 1/√eps = 1000
            torch.nn.init.normal_(model.get_input_embeddings().weight, std=config.initializer_range)
            model.save_pretrained(folder)  # in the layout of published checkpoints: experts one by one
            _rewrite_weights(folder, config, shards, recipe["mtp"])
        _tokenizer(_GLM_CHAT if name == "glm5_2" else _CHATML).save_pretrained(folder)
    return Path(out)


def tiny_data(out: str | Path, train: int = 256, val: int = 10) -> Path:
    """Write train.parquet and val.parquet into directory `out` and return it: `say 7` wants a 7."""
    recipe = {"data": "say", "train": train, "val": val}
    with _written_whole(Path(out), recipe) as folder:
        if folder is None:
            return Path(out)
        import pandas

        for split, rows in (("train", train), ("val", val)):
            table = [
                {
                    "data_source": "say",
                    "prompt": [{"role": "user", "content": f"say {index % 10}"}],
                    "ability": "say",
                    "reward_model": {"style": "rule", "ground_truth": str(index % 10)},
                    "extra_info": {"split": split, "index": index},
                }
                for index in range(rows)
            ]
            pandas.DataFrame(table).to_parquet(folder / f"{split}.parquet")
    return Path(out)


def _rewrite_weights(folder: Path, config, shards: int, mtp: bool) -> None:
    """Write model.safetensors again: with the MTP layer, and in as many files as wanted."""
    from safetensors.torch import load_file, save_file

    whole = folder / "model.safetensors"
    weights = load_file(whole)
    extra = _mtp_weights(weights, config) if mtp else {}
    if shards == 1:
        save_file(weights | extra, whole, {"format": "pt"})
        return
    whole.unlink()
    names = sorted(weights, key=lambda name: (name.startswith("lm_head"), name))  # the head last, as it is published
    half = len(names) // 2
    files = {
        "model-00001-of-00002.safetensors": {name: weights[name] for name in names[:half]},
        "model-00002-of-00002.safetensors": {name: weights[name] for name in names[half:]} | extra,
    }
    for file, part in files.items():
        save_file(part, folder / file, {"format": "pt"})
    index = {
        "metadata": {"total_size": sum(weight.nbytes for part in files.values() for weight in part.values())},
        "weight_map": {name: file for file, part in files.items() for name in sorted(part)},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _mtp_weights(weights: dict, config) -> dict:
    """The MTP layer: a sparse layer like the last one, norms for its two inputs, and what joins these."""
    import torch

    last, own = (f"model.layers.{config.num_hidden_layers - back}." for back in (1, 0))
    hidden = config.hidden_size
    shapes = {name.replace(last, own): weight.shape for name, weight in weights.items() if name.startswith(last)}
    shapes |= {f"{own}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{own}eh_proj.weight"] = (hidden, 2 * hidden)
    return {
        name: torch.ones(shape) if len(shape) == 1 else config.initializer_range * torch.randn(shape)
        for name, shape in shapes.items()
    }


def _tokenizer(chat_template: str):
    """Words separated by spaces; a newline is a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[2:]),
        model_max_length=MAX_POSITIONS,
        chat_template=chat_template,
    )


@contextmanager
def _written_whole(out: Path, recipe: dict) -> Iterator[Path | None]:
    """A folder that becomes `out` at the end, with the recipe inside; None when `out` was built from it already.

    Whoever looks at `out` sees nothing or all of it, also after a crash and while two processes build it.
    """
    if _is_built(out, recipe):
        yield None
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        folder = Path(scratch, "whole")
        folder.mkdir()
        yield folder
        (folder / _RECIPE).write_text(json.dumps(recipe) + "\n")
        try:
            folder.rename(out)
        except OSError:
            if not _is_built(out, recipe):
                raise


def _is_built(out: Path, recipe: dict) -> bool:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        found = json.loads((out / _RECIPE).read_text())
    except (OSError, ValueError):
        found = "something this module did not build"
    if found != recipe:
        raise FileExistsError(f"{out} holds {found}, not {recipe}. Choose another directory, or remove this one.")
    return True


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.cpu.tiny_models", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*NAMES, "data"])
    parser.add_argument("out", type=Path, help="directory to build; kept when it is complete already")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    parser.add_argument("--shards", type=int, default=1, choices=[1, 2], help="number of weight files (default 1)")
    parser.add_argument(
        "--mtp", action=argparse.BooleanOptionalAction, default=True, help="glm5_2: put the MTP layer in the checkpoint"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="build the data set here as well")
    options = parser.parse_args(arguments)
    try:
        if options.data is not None:
            print(tiny_data(options.data))
        if options.what == "data":
            print(tiny_data(options.out))
        else:
            print(tiny_model(options.what, options.out, options.seed, options.shards, options.mtp))
    except FileExistsError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
