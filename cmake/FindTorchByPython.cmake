# Finds LibTorch inside a Python interpreter's torch: FSDP_PYTHON, else python3;
# or wherever CMAKE_PREFIX_PATH leads.

if(FSDP_PYTHON)
  execute_process(
    COMMAND ${FSDP_PYTHON} -c "import torch; print(torch.utils.cmake_prefix_path)"
    OUTPUT_VARIABLE torch_prefix OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${FSDP_PYTHON} cannot import torch")
  endif()
  list(PREPEND CMAKE_PREFIX_PATH ${torch_prefix})
endif()
find_package(Torch REQUIRED)
message(STATUS "Torch ${Torch_VERSION}")
