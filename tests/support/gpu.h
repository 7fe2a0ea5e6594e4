#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#define SKIP_WITHOUT_GPU()                  \
  if (!torch::cuda::is_available()) {       \
    GTEST_SKIP() << "there is no GPU here"; \
  }
