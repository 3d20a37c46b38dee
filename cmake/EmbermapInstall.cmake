# find_package(embermap) for an installed copy.
include(CMakePackageConfigHelpers)
set(EMBERMAP_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/embermap)
install(EXPORT embermap-targets NAMESPACE embermap:: DESTINATION ${EMBERMAP_CMAKE_DIR} COMPONENT development)
configure_package_config_file(cmake/embermap-config.cmake.in ${PROJECT_BINARY_DIR}/embermap-config.cmake
                              INSTALL_DESTINATION ${EMBERMAP_CMAKE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/embermap-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/embermap-config.cmake ${PROJECT_BINARY_DIR}/embermap-config-version.cmake
        DESTINATION ${EMBERMAP_CMAKE_DIR} COMPONENT development)
install(FILES cmake/FindHdf5C.cmake cmake/FindLibdeflate.cmake cmake/FindLibtorch.cmake cmake/FindUring.cmake DESTINATION ${EMBERMAP_CMAKE_DIR} COMPONENT development)
