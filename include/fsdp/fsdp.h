#pragma once

#include <torch/torch.h>

#include <fsdp/device_mesh.h>
#include <fsdp/distributed.h>
#include <fsdp/dtensor.h>
#include <fsdp/error.h>
#include <fsdp/fully_shard.h>
#include <fsdp/hooked.h>
#include <fsdp/launch.h>
#include <fsdp/nn.h>
#include <fsdp/optim.h>
#include <fsdp/placement.h>
#include <fsdp/process_group.h>
#include <fsdp/reduce_op.h>
#include <fsdp/tree.h>
#include <fsdp/version.h>
