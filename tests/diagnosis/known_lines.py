"""Lines of logs by the cause they show: each from the source its cause names, shortened, with the prefixes it had.

Of HCCL's and ACL's rarer codes only the code and the form of the line are known; their words here are placeholders.
"""

OPTIONAL = "/usr/lib/python3/site-packages/verl/workers/engine/__init__.py:32: UserWarning: "
WORKER = "(VllmWorker TP1 pid=961) ERROR 09-07 01:11:09 [multiproc_executor.py:596] "
ERROR = "(EngineCore_DP0 pid=7) ERROR 06-17 06:11:34 [multiproc_executor.py:492] "


def acl(*codes):
    """ACL's error codes as torch_npu, vllm-ascend and CANN's runtime print them."""
    forms = (
        f"{WORKER}RuntimeError: NPU function error: AclrtSynchronizeStreamWithTimeout(stream), error code is {{}}",
        f"{WORKER}RuntimeError: Worker failed with error 'ACL stream synchronize failed, error code:{{}}', please",
        f"{WORKER}       synchronize stream failed, runtime result = {{}}[FUNC:ReportCallError][FILE:log_inner.cpp]",
    )
    return [form.format(code) for code in codes for form in forms]


KNOWN_LINES = {
    "platform-of-a-cpu-actor": [
        "(TaskRunner pid=3) Platform 'npu' (PlatformNPU) is registered but not available. This may be due to"
    ],
    "optional-engine": [
        f"{OPTIONAL}torchtitan engine is not available: ModuleNotFoundError(\"No module named 'torchtitan'\")",
        f"{OPTIONAL}veomni engine is not available: ModuleNotFoundError(\"No module named 'veomni'\")",
        f"{OPTIONAL}automodel engine is not available: ModuleNotFoundError(\"No module named 'nemo_automodel'\")",
    ],
    "hub-404": ['HTTP Request: HEAD https://huggingface.co/Qwen/Qwen3-8B/resolve/main/x.json "HTTP/1.1 404 Not Found"'],
    "zipfile-serialization": [
        'Warning: torch.save with "_use_new_zipfile_serialization = False" is not recommended for npu tensor, which may'
    ],
    "broken-weights": [
        "FloatingPointError: The rollout's logits are not finite: the weights the trainer sent are broken. Look at"
    ],
    "resource-tracker": [
        "resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects",
        "UserWarning: resource_tracker: process died unexpectedly, relaunching.  Some resources might leak.",
    ],
    "cuda-only-library": [
        "WARNING 06-16 15:10:59 [_custom_ops.py:21] Failed to import from vllm._C with ImportError('libcudart.so.12: "
        "cannot open shared object file: No such file or directory')"
    ],
    "ended-from-outside": ["*** SIGTERM received at time=1795995989 on cpu 0 ***"],
    "unknown-key": [
        "Could not override 'actor_rollout_ref.actor.fsdp_config.grad_offload'.",
        "Key 'reward_model' is not in struct, full_key: reward_model.reward_model",
    ],
    "needless-plus": ["Could not append to config. An item is already at 'trainer.device'."],
    "engine-of-another-verl": ["Could not find 'model_engine/mindspeed'"],
    "rollout-mode": ["ValueError: Rollout mode 'sync' has been removed. Please set "],
    "bridge-needed": ["AssertionError: use_mbridge must be True"],
    "glm-patch": [
        "RuntimeError: VERL_VLLM_ASCEND_GLM52_PATCH requires inspectable vllm/vllm-ascend 0.23.x Python sources.",
        "RuntimeError: VERL_VLLM_ASCEND_GLM52_PATCH found an unsupported AscendRMSNorm.forward_oot implementation.",
        "RuntimeError: VERL_VLLM_ASCEND_GLM52_PATCH could not load the required vllm-ascend 0.23.x patch targets.",
    ],
    "external-module": ["ValueError: Empty module name", "ModuleNotFoundError: No module named ' recipes'"],
    "micro-batch-twice": [
        "ValueError: [actor] You have set both 'actor.ppo_micro_batch_size' AND 'actor.ppo_micro_batch_size_per_gpu'."
    ],
    "micro-batch-missing": ["ValueError: [actor] Please set at least one of 'actor.ppo_micro_batch_size' or "],
    "router-replay": ["ValueError: router_replay.mode='R2' and enable_rollout_routing_replay=True "],
    "train-batch-below-mini": ["ValueError: train_batch_size (8) must be >= actor.ppo_mini_batch_size (16)"],
    "mini-batch-and-data-parallel": [
        "AssertionError: Got mini_batch_size=12 and self.engine.get_data_parallel_size()=8"
    ],
    "batch-and-data-parallel": [
        "AssertionError: real_train_batch_size (12) must be divisible by minimal possible batch size (8)",
        "AssertionError: only support equal chunk. Got size of DataProto 12 and chunk 8.",
    ],
    "micro-batch-and-mini": ["ValueError: ppo_mini_batch_size (16) must be divisible by ppo_micro_batch_size (3)"],
    "token-budget": [
        "AssertionError: max_token_len must be greater than the sequence length. Got max_token_len=64 and"
    ],
    "empty-data": [
        "AssertionError: Train dataloader is empty!",
        "AssertionError: Validation dataloader is empty!",
    ],
    "no-reward-function": [
        "NotImplementedError: Reward function is not implemented for data_source='openai/gsm9k'",
    ],
    "no-ground-truth": ["KeyError: 'reward_model'"],
    "rollout-world": ["AssertionError: rollout world_size: 6 is not divisible by infer_world_size: 4"],
    "expert-world": [
        "RuntimeError: world_size (8) is not divisible by expert_tensor_model_pipeline_parallel size (16)"
    ],
    "world": [
        "RuntimeError: world_size (8) is not divisible by 16",
        "AssertionError: n_gpus (8) must be divisible by model_parallel_size (16) times context_parallel_size (1)",
    ],
    "rollout-expert": [
        "ValueError: expert_parallel_size must be equal to tensor_model_parallel_size * data_parallel_size"
    ],
    "rollout-node": [
        "AssertionError: world_size 12 must be divisible by gpus_per_node 8",
        "AssertionError: gpus_per_node should be divisible by the tensor parallel size",
    ],
    "rollout-heads": [
        "ValueError: Total number of attention heads (64) must be divisible by tensor parallel size (3)."
    ],
    "heads": [
        "ValueError: num_attention_heads (14) must be a multiple of tensor_model_parallel_size (4).",
        "ValueError: num_query_groups (2) must be a multiple or divisor of tensor_model_parallel_size (3).",
    ],
    "pipeline-split": [
        "AssertionError: num_layers=78 should be divisible by config.pipeline_model_parallel_size=8",
        "AssertionError: With uneven pipelineing the left over layers must be divisible by left over stages",
        "ValueError: number of middle layers: 7 must be divisible by middle pipeline_model_parallel_size 2",
        "ValueError: number of layers at middle stage: 7 must be divisible bythe middle pipeline model parallel size 2",
    ],
    "pipeline-layout": [
        "ValueError: pipeline_model_parallel_layout cannot be set with other pipeline layout arguments."
    ],
    "virtual-pipeline": [
        "ValueError: micro_batches 3 must be divisible by num_batches_divided_by 2 for megatron backend"
    ],
    "virtual-pipeline-alone": [
        "RuntimeError: pipeline-model-parallel size should be greater than 1 with interleaved schedule"
    ],
    "pipeline-layout-layers": ["AssertionError: Number of decoder layers 77must match num_layers 78"],
    "sparse-attention": [
        "AssertionError: Currently context parallelism is not supported by DSAttention!",
        "AssertionError: RoPE fusion is not supported for DSAttention",
    ],
    "experts-without-sequence-parallel": [
        "ValueError: performance may degrade if MoE and tensor parallelismare enabled without also enabling sequence "
        "parallelism."
    ],
    "routing-replay-of-an-old-vllm": [
        "ValueError: rollout.enable_rollout_routing_replay=True requires vLLM >= 0.22.0 (installed: 0.18.0)."
    ],
    "async-batch": [
        "AssertionError: train_batch_size must equal parameter_sync_step * ppo_mini_batch_size in separate"
    ],
    "runtime-env-twice": ["ValueError: Failed to merge the Job's runtime env {'env_vars': {'A': '1'}} with"],
    "sequence-parallel": ["ValueError: Cannot use sequence parallelism without tensor parallelism"],
    "experts-of-a-dense-model": ["ValueError: num_moe_experts must be non None to use expert-parallel."],
    "recompute-layers": [
        "ValueError: When using recompute_granularity: full recompute_num_layers must be between 1 and 4"
    ],
    "no-mtp-layer": ["ValueError: enable mtp while model has no mtp layer, please use a model with mtp layer"],
    "too-few-devices": ["ValueError: Total available GPUs 8.0 is less than total desired GPUs 16"],
    "update-bucket": [
        "AssertionError: Weight model.embed_tokens.weight(torch.Size([151936, 4096]), torch.float32) is too large to "
        "fit in the bucket."
    ],
    "kv-cache": [
        f"{ERROR}ValueError: To serve at least one request with the models's max seq len (202752), (13.6 GiB KV cache"
    ],
    "kv-cache-negative": ["Available KV cache memory: -0.87 GiB"],
    "max-model-len": [
        "ValueError: max_model_len (131072) should be less than or equal to max_position_embeddings (40960)"
    ],
    "expandable-segments": ["AssertionError: Expandable segments are not compatible with memory pool. Please track "],
    "memory-after-sleep": ["AssertionError: Memory usage increased after sleeping."],
    "device-memory-taken": [
        f"{ERROR}ValueError: Free memory on device (7.34/61.0 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 54.9 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    ],
    "no-megatron-bridge": ["(TaskRunner pid=18998) ModuleNotFoundError: No module named 'megatron.bridge'"],
    "no-acl": ["ModuleNotFoundError: No module named 'acl'"],
    "no-mindspeed": [
        "ModuleNotFoundError: No module named 'mindspeed.megatron_adaptor'",
        "ModuleNotFoundError: No module named 'megatron_adaptor'",
    ],
    "no-vllm-ascend": ["[rank1]: ModuleNotFoundError: No module named 'vllm_ascend'"],
    "torch-npu-symbol": [
        "ImportError: /usr/lib/python3/torch_npu/lib/libtorch_npu.so: undefined symbol: _ZN5torch10ValueErrorC1EPKcz"
    ],
    "no-nnal": [f"{ERROR}OSError: libatb.so: cannot open shared object file: No such file or directory"],
    "no-cann": ["ImportError: libhccl.so: cannot open shared object file: No such file or directory"],
    "no-driver": ["ImportError: libascend_hal.so: cannot open shared object file: No such file or directory"],
    "no-device": [
        "RuntimeError: no NPU available",
        "RuntimeError: torch_npu detected, but NPU device is not available or visible.",
        "Can't get ascend_hal device count",
    ],
    "visible-devices": [
        "EE1001: [PID: 42] The argument is invalid.Reason: set ASCEND_RT_VISIBLE_DEVICES:4 error, input data rang[0-2)",
        "The argument is invalid.Reason: Set visible device failed, invalid device=1, input visible devices:1",
    ],
    "device-start": [
        "RuntimeError: Initialize:torch_npu/csrc/core/npu/sys_ctrl/npu_sys_ctrl.cpp:146 NPU function error: "
        "c10_npu::SetDevice(device_id_), error code is 507033",
        "aclrtSetDevice: open device 0 failed, runtime result = 507033",
    ],
    "mindspeed-version": [
        "ImportError: cannot import name 'HcclOpModeSetFeature' from 'mindspeed.features_manager' (/MindSpeed)"
    ],
    "mindspeed-too-old": ["KeyError: 'decoder.layers.0.self_attention.q_layernorm.weight'"],
    "transformers-drift": ["TypeError: '>' not supported between instances of 'str' and 'int'"],
    "unknown-architecture": [
        "ValueError: The checkpoint you are trying to load has model type `glm_moe_dsa` but Transformers does not "
        "recognize this architecture. This could be because of an issue with the checkpoint",
    ],
    "mindspeed-not-patched": [
        f"{OPTIONAL}mindspeed engine is not available: ModuleNotFoundError(\"No module named 'mindspeed'\")",
        f"{OPTIONAL}megatron engine is not available: ImportError('cannot import name x')",
    ],
    "hccl-environment": [
        "EI0001: 2024-04-20-10:42:34.020.677 Environment variable [HCCL_EXEC_TIMEOUT] is invalid. Reason: it should",
        "Config_Error_Invalid_Environment_Variable(EI0001): Environment variable [HCCL_EXEC_TIMEOUT] is invalid.",
    ],
    "hccl-port": [
        "[rank0]: EJ0003: [PID: 159] 2025-03-26-17:01:02.816.428 The server could not listen.",
        "Communication_Error_Bind_IP_Port(EJ0003): the port is taken",
        "EI0019: [PID: 7] the host network adapter cannot listen",
        "EI0020: [PID: 7] the NPU network adapter cannot listen",
        "Failed to bind the IP port. Reason: unknown",
        "Reason: The IP address and port have been bound already.",
        "Reason: The IP address 192.168.1.100 and port 50001 have already been bound.",
    ],
    "hccl-process": [
        "EJ0001: 2024-05-21-11:57:54.167.645 no words",
        "HCCP_Process_Initialization_Failure(EJ0001): no words",
        "Failed to initialize the HCCP process. Reason: Maybe the last training process is running.",
    ],
    "hccl-arguments-differ": ["EI0005: [PID: 7] arguments differ", "Invalid_Argument(EI0005): arguments differ"],
    "hccl-memory": [
        "EI0007: [PID: 7] allocation",
        "Resource_Error(EI0007): allocation",
        "EI0011: [PID: 7] device",
        "Resource_Error_Insufficient_Device_Memory(EI0011): device",
    ],
    "hccl-versions": ["EI0008: [PID: 7] version", "Package_Error_Incorrect_HCCL_Version(EI0008): version"],
    "hccl-rank-table": [
        "EI0004: [PID: 7] rank table",
        "File_Operation_Error_Parse(EI0004): rank table",
        "EI0014: [PID: 7] rank table",
        "Config_Error_Ranktable(EI0014): rank table",
        "EI0017: [PID: 7] rank table",
        "Config_Error_Ranktable(EI0017): rank table",
    ],
    "hccl-rank-missing": [
        "EI0015: [PID: 7] ranks are missing",
        "Communication_Error_Ranktable_Detect(EI0015): ranks are missing",
    ],
    "hccl-cqe": [
        "EI0012: [PID: 7] SDMA",
        "Execution_Error_SDMA(EI0012): copy",
        "EI0013: [PID: 7] ROCE",
        "Execution_Error_ROCE_CQE(EI0013): link",
        "EI0018: [PID: 7] UB",
        "Execution_Error_UB_CQE(EI0018): link",
    ],
    "hccl-transport": [
        "[rank1]: EI0009: [PID: 2225827] 2025-09-24-20:59:48.119.066 Create Dest error! createLink para:rank[1]",
        "Communication_Error_Initialize_Transport(EI0009): no link",
        "Transport init error. Reason: [Create][DestLink]Create Dest error!",
    ],
    "hccl-socket": [
        "[rank1]: EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 the remote rank did not send",
        "Communication_Error_Get_Socket(EI0006): srcRank[192.168.0.192/0] connect destRank[192.168.0.125/0] fail",
        "Getting socket times out. Reason: Remote Rank did not send the data in time.",
    ],
    "hccl-notify": [
        "EI0002: base information: [streamID:[1], taskID[39]]",
        "Communication_Error_Timeout(EI0002): waited",
        "The wait execution of the Notify register times out. Reason: The Notify register has not received",
        "task: notify wait, remote rank 3",
        "base information: [streamID:[1], taskID[39], taskType[Notify Wait], tag[AllReduce_192.168.0.116]]",
        "An timeout occurs when the Notify register waits for execution. Waiting peer rank: 3; task information:",
        "(default 1800s, You can set the interval by using HCCL_EXEC_TIMEOUT.)",
        "the collective timed out after HCCL_EXEC_TIMEOUT",
        "execution timeout: HCCL_EXEC_TIMEOUT is 1800 s",
        "HCCL_EXEC_TIMEOUT (1800 s) has timed out",
        "locate the cause or set the HCCL_EXEC_TIMEOUT environment variable to a larger value.",
    ],
    "stream-timeout": [
        "EE1002: 2024-09-03-16:50:00.041.231 Stream synchronize timeout. rtDeviceSynchronize execute failed",
        "[W NPUStream.cpp:409] NPU warning, error code is 507046[Error]: ",
        *acl(507046, 507048),
        f"{WORKER}        rtStreamSynchronizeWithTimeout execute failed, reason=[fftsplus timeout][FUNC:",
    ],
    "hccl-init": [
        "(TaskRunner pid=30188) RuntimeError: create_config:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:102 "
        "HCCL function error: hcclCommInitRootInfoConfig(numRanks, &rootInfo, rank, config), error code is 4",
        "RuntimeError: create: HCCL function error: HcclCommInitRootInfo(numRanks, &rootInfo, rank, comm)",
        "[ERROR] 2025-10-29-02:17:03 (PID:144556, Device:0, RankID:0) ERR02200 DIST call hccl api failed.",
    ],
    "collective-timeout": [
        "[rank7]:[E419 10:42:28.858931807 ProcessGroupNCCL.cpp:616] [Rank 7] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=4486, OpType=ALLTOALL, NumelIn=46684160, Timeout(ms)=600000) ran for 600013 ms",
    ],
    "store-incomplete": [
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/8 clients joined."
    ],
    "rendezvous": [
        "(WorkerDict pid=904548) [E331 20:50:12.688969421 socket.cpp:1011] [c10d] The client socket has timed out "
        "after 1800000ms while trying to connect to (10.123.0.1, 38321)"
    ],
    "npu-memory": [
        "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.96 GiB total capacity; 55.91 GiB"
    ],
    "gpu-memory": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.91 GiB. GPU 0 has a total capacity"
    ],
    "driver-memory": [
        "EL0004: [PID: 5] Failed to allocate memory. Possible Cause: Available memory is insufficient.",
        "[PID: 210907] Memory_Allocation_Failure(EL0004): Failed to allocate memory requested by GE module.",
        "EL0019: [PID: 5] memory",
        "Resource_Error_Insufficient_Device_Memory(EL0019): memory",
    ],
    "job-memory": [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=14604003.0 cgroup. Some of your processes may have",
        "srun: error: o0616: task 0: Out Of Memory",
    ],
    "host-memory": [
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
    "stale-shm": ["AssertionError: Stale shm segment 'verl_w_0': expected 2147483648 bytes, got 1073741824"],
    "shm-full": [
        "ERROR: Unexpected bus error encountered in worker. This might be caused by something else",
        "RuntimeError: a reader is killed by signal: Bus error. It is possible that",
        "This might be caused by insufficient shared memory (shm).",
    ],
    "threads": [
        "(WorkerDict pid=27497) Unhandled exception: what(): thread: Resource temporarily unavailable [system:11]",
        "RuntimeError: can't start new thread",
    ],
    "open-files": ["OSError: [Errno 24] Too many open files"],
    "disk": ["OSError: [Errno 28] No space left on device", "OSError: [Errno 122] Disk quota exceeded"],
    "nan-gradient": [
        "AssertionError: Rank 11: found NaN in local grad norm in backward pass before data-parallel communication",
        "NotImplementedError: Megatron optimizer step failed. This should not happen",
    ],
    "skipped-step": ["(WorkerDict pid=9092) WARN: grad_norm is not finite: nan"],
    "kernel-fault": [
        "EZ9999: The error from device(chipId:0, dieId:0), there is an aicore error exception, core id is 0",
        "EZ9999: The error from device(chipId:1, dieId:0), there is an exception of aivec error, core id is 21",
        "EZ9999: The error from device(chipId:2, dieId:0), there is an exception of aicore error, core id is 3",
        "Kernel task happen error, retCode=0x31, [vector core exception].[FUNC:PreCheckTaskErr]",
        "Kernel task happen error, retCode=0x25, [aicore timeout].[FUNC:PreCheckTaskErr]",
        *acl(507011, 507014, 507015, 507016, 507034, 507035),
    ],
    "aicpu-fault": [
        *acl(507018),
        "E39999: Inner Error! Aicpu kernel execute failed",
        "        rtDeviceSynchronizeWithTimeout execute failed, reason=[aicpu exception][FUNC:FuncErrorReason]",
    ],
    "unsupported-operator": [
        "EZ3002: [PID: 141730] Optype [TransData] of Ops kernel [AIcoreEngine] is unsupported.",
        "Unsupported_Operator(EZ3002): Optype [TransData] of Ops kernel [AIcoreEngine] is unsupported.",
        "EZ3003: [PID: 5] No supported Ops kernel and engine are found for [TopK], optype [TopK].",
        "Unsupported_Operator(EZ3003): No supported Ops kernel and engine are found for [TopK], optype [TopK].",
    ],
    "kernels-of-another-cann": acl(561103),
    "device-lost": acl(507010),
    "checkpoint-not-shared": [
        "FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/global_step_8/actor/dist_ckpt/common.pt'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/global_step_8/actor/dist_ckpt/.metadata'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/global_step_8/actor/dist_ckpt/metadata.json'",
    ],
    "export-lost-shard": [
        "KeyError: \"Tensor 'x' from generator not found in the original model. To ignore, set strict=False.\""
    ],
    "export-incomplete": [
        "Warning: The following files could not be saved because the generator did not yield all of their tensors:",
        "Error: 12 tensors from the original checkpoint were not written. See warnings above for details.",
    ],
    "resume-path": ["AssertionError: resume ckpt must specify the global_steps"],
    "no-model": [
        "OSError: /models/Qwen3 is not a local folder and is not a valid model identifier listed on",
        "OSError: /models/Qwen3 does not appear to have a file named config.json. Checkout",
    ],
    "dataloader-worker": [
        "RuntimeError: DataLoader worker (pid 3216) is killed by signal: Killed.",
        "RuntimeError: DataLoader worker (pid(s) 3216) exited unexpectedly",
    ],
    "engine-start": ["RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"],
    "engine-died": [
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
        "ERROR 01-16 17:16:49 [core_client.py:605] Engine core proc EngineCore_DP0 died unexpectedly, shutting down",
    ],
    "worker-died": [
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail:",
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. To troubleshoot",
        "(1) The process is killed by SIGKILL by OOM killer due to high memory usage.",
        "The worker may have exceeded K8s pod memory limits.",
        "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file.",
        "(3) The worker is crashed unexpectedly due to SIGSEGV or other unexpected errors.",
    ],
    "killed": [
        "(raylet) The worker process was killed by SIGKILL, exit code -9",
        "run.sh: line 12: 12345 Killed                  python3 -m verl.trainer.main_ppo",
    ],
    "crashed": [
        "(WorkerDict pid=1) Fatal Python error: Segmentation fault",
        "*** SIGSEGV received at time=1795995989 on cpu 0 ***",
    ],
    "aborted": [
        "Fatal Python error: Aborted",
        "Aborted (core dumped)",
        "run.sh: line 3:   123 Aborted                 (core dumped) python3 -m verl.trainer.main_ppo",
        "terminate called after throwing an instance of 'c10::Error'",
    ],
    "job-time-limit": ["slurmstepd: error: *** JOB 1234 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"],
    "job-cancelled": ["slurmstepd: error: *** STEP 1234.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***"],
    "actor-died": [
        "ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.",
        "ray.exceptions.ActorDiedError: the actor is gone",
        "ray.exceptions.ActorUnavailableError: The actor 5066c201b724 is unavailable",
    ],
    "ray-start": [
        "Exception: The current node timed out during startup. This could happen because some of the raylet failed to"
    ],
    "shm-broadcast": [
        "(EngineCore_DP1 pid=235461) INFO 12-16 08:25:51 [shm_broadcast.py:466] No available shared memory broadcast "
        "block found in 60 seconds. This typically happens when some processes are hanging"
    ],
    "cann-internal": [
        *(f"{code}: Inner Error!" for code in ("E19999", "E39999", "EE9999", "EH9999", "EI9999", "EJ9999", "EL9999")),
        "EZ9999: Inner Error!",
        *(f"Inner_Error({code}): 1" for code in ("E19999", "E39999", "EE9999", "EH9999", "EI9999", "EJ9999", "EL9999")),
        "EZ9999[PID: 91583] 2026-04-15-11:09:31.973.508 (EZ9999):  no words",
        f"{WORKER}[ERROR] 2025-09-07-01:11:09 (PID:961, Device:1, RankID:-1) ERR00100 PTA call acl api failed",
        "[rank1]: [ERROR] 2025-04-08-18:07:20 (PID:1292363, Device:1, RankID:1) ERR01100 OPS call acl api failed.",
    ],
}
