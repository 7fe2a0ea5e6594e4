# Finds LibTorch in the torch of the interpreter FSDP_PYTHON. If that is not set, finds it through
# CMAKE_PREFIX_PATH.

if(SKBUILD) # pip builds
  set(FSDP_PYTHON ${Python_EXECUTABLE})
endif()
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

# The build folder has the layout of an installation, so binaries in both find the library and torch
# by the same RPATH. If torch moves after the installation, set RPATH or LD_LIBRARY_PATH.
get_filename_component(torch_lib_dir ${TORCH_LIBRARY} DIRECTORY)
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}" ${torch_lib_dir})
if(TORCH_CUDA_LIBRARIES) # they are in other folders
  set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)
endif()
