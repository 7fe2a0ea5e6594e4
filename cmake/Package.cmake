# Install rules and the CMake package: find_package(fsdp) gives fsdp::fsdp.

include(CMakePackageConfigHelpers)

# The library finds torch where it was built against it; an installation that
# moves torch sets its own RPATH or LD_LIBRARY_PATH.
get_filename_component(torch_lib_dir ${TORCH_LIBRARY} DIRECTORY)
set_target_properties(fsdp PROPERTIES INSTALL_RPATH "$ORIGIN;${torch_lib_dir}")

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
install(TARGETS fsdp EXPORT fsdpTargets FILE_SET HEADERS)
if(FSDP_BUILD_CLI)
  set_target_properties(
    fsdp_cli PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${torch_lib_dir}")
  install(TARGETS fsdp_cli)
endif()
install(EXPORT fsdpTargets NAMESPACE fsdp:: DESTINATION ${package_dir})
configure_package_config_file(
  cmake/fsdpConfig.cmake.in ${PROJECT_BINARY_DIR}/fsdpConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fsdpConfig.cmake ${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake
        DESTINATION ${package_dir})
