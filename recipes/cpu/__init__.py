"""The CPU target: unmodified verl and Megatron-Core train on gloo ranks, without an accelerator.

Nothing here is imported by the rest of the package. verl itself imports `recipes.cpu.adaptor` when that name stands in
VERL_USE_EXTERNAL_MODULES, in each of its processes; params/cpu/base.yaml says which environment and verl keys go with
it.

    tiny_models   builds the models a CPU can train: Qwen3, Qwen3-MoE, GLM-5.2-shaped
    adaptor       the external module: checks, then installs what follows
    import_hook   runs a function before, after or around the import of a module
    replace       replaces one attribute of a module after checking that it is the one we know
    torch_cuda    what Megatron asks of torch.cuda, answered by the CPU
    platform      verl's platform "cpu"
    cluster_job   joins the cluster whose job the driver is
    ranks         the Ray resource that stands for a device
    verl_patches  verl's call sites that are not behind its platform
    megatron      Megatron-Core's call sites, and its torch layers for sparse attention (DSA)
    bridge        Megatron-Bridge without TransformerEngine, and its GLM mapping for unfused experts
    hf_glm        the rotary embedding of transformers' GLM
    rollout       the rollout replica `hf_cpu`
    server        the Ray actor behind it, without verl or Megatron
    weight_sync   verl's checkpoint engine over gloo, for rollouts with ranks of their own
    generate      batched sampling with a KV cache and one generator a request
    parity        proves that Megatron and transformers compute the same logits
"""
