# Install rules and the CMake package: find_package(fsdp) gives fsdp::fsdp.

include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
install(TARGETS fsdp EXPORT fsdpTargets FILE_SET HEADERS)
if(FSDP_BUILD_CLI)
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
