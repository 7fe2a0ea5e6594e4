#pragma once

// The umbrella, for programs: with all of LibTorch. The other headers are light.
#include <torch/torch.h>

#include <fsdp/activation_checkpointing.h>
#include <fsdp/call.h>
#include <fsdp/checkpoint.h>
#include <fsdp/clip_grad_norm.h>
#include <fsdp/comm.h>
#include <fsdp/debug.h>
#include <fsdp/device_mesh.h>
#include <fsdp/distributed.h>
#include <fsdp/dtensor.h>
#include <fsdp/error.h>
#include <fsdp/extension.h>
#include <fsdp/fully_shard.h>
#include <fsdp/grad_scaler.h>
#include <fsdp/hooked.h>
#include <fsdp/launch.h>
#include <fsdp/memory.h>
#include <fsdp/meta_init.h>
#include <fsdp/module_ref.h>
#include <fsdp/nn.h>
#include <fsdp/optim.h>
#include <fsdp/parallel_cross_entropy.h>
#include <fsdp/param.h>
#include <fsdp/placement.h>
#include <fsdp/policy.h>
#include <fsdp/process_group.h>
#include <fsdp/random_state.h>
#include <fsdp/redistribute.h>
#include <fsdp/reduce_op.h>
#include <fsdp/state_dict.h>
#include <fsdp/tensor_parallel.h>
#include <fsdp/tie_weights.h>
#include <fsdp/tree.h>
#include <fsdp/version.h>
