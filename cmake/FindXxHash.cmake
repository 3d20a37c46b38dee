# xxHash is used through its header alone (XXH_INLINE_ALL), so that nothing has to be linked.
find_path(XxHash_INCLUDE_DIR xxhash.h)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(XxHash REQUIRED_VARS XxHash_INCLUDE_DIR)
if(XxHash_FOUND AND NOT TARGET XxHash::header)
  add_library(XxHash::header INTERFACE IMPORTED)
  target_include_directories(XxHash::header INTERFACE ${XxHash_INCLUDE_DIR})
endif()
