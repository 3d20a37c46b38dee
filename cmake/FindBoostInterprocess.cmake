# Boost.Interprocess is used through its headers alone, so that nothing has to be linked.
find_path(BoostInterprocess_INCLUDE_DIR boost/interprocess/mapped_region.hpp)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(BoostInterprocess REQUIRED_VARS BoostInterprocess_INCLUDE_DIR)
if(BoostInterprocess_FOUND AND NOT TARGET BoostInterprocess::headers)
  add_library(BoostInterprocess::headers INTERFACE IMPORTED)
  target_include_directories(BoostInterprocess::headers SYSTEM INTERFACE ${BoostInterprocess_INCLUDE_DIR})
endif()
mark_as_advanced(BoostInterprocess_INCLUDE_DIR)
