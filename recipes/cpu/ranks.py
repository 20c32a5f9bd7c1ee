"""The Ray resource that stands for a device."""

RANK_RESOURCE = "cpu_rank"
"""What one training rank takes, offered by params/cpu/base.yaml. Not "NPU": Ray would look for Ascend's driver and log
a traceback. Not "GPU": Ray refuses to offer more of those than CUDA_VISIBLE_DEVICES, which is empty, names."""
