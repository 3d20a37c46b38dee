# HDF5's C library, by header and shared library alone. CMake's own FindHDF5 asks the compiler wrapper h5cc, which names folders of the machine
# it was made on, and needs the C language enabled.
# Debian has the serial build in a folder of its own (include/hdf5/serial) and under a name of its own.
find_path(Hdf5C_INCLUDE_DIR hdf5.h HINTS ${HDF5_ROOT} $ENV{HDF5_ROOT} PATH_SUFFIXES include/hdf5/serial hdf5/serial include)
find_library(Hdf5C_LIBRARY NAMES hdf5_serial hdf5 HINTS ${HDF5_ROOT} $ENV{HDF5_ROOT} PATH_SUFFIXES lib hdf5/serial)
if(Hdf5C_INCLUDE_DIR AND EXISTS ${Hdf5C_INCLUDE_DIR}/H5public.h)
  file(STRINGS ${Hdf5C_INCLUDE_DIR}/H5public.h _hdf5_version REGEX "^#define H5_VERS_INFO ")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" Hdf5C_VERSION "${_hdf5_version}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Hdf5C REQUIRED_VARS Hdf5C_LIBRARY Hdf5C_INCLUDE_DIR VERSION_VAR Hdf5C_VERSION)
if(Hdf5C_FOUND AND NOT TARGET hdf5::hdf5)
  add_library(hdf5::hdf5 UNKNOWN IMPORTED)
  set_target_properties(hdf5::hdf5 PROPERTIES IMPORTED_LOCATION ${Hdf5C_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${Hdf5C_INCLUDE_DIR})
endif()
mark_as_advanced(Hdf5C_INCLUDE_DIR Hdf5C_LIBRARY)
