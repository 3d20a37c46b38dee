# libtorch as it lies in the torch package of a Python. Asked by path rather than through TorchConfig.cmake, which enables CUDA in the whole
# project whenever torch was built with it, and stops where nvcc is missing.
# Input: Python_EXECUTABLE (found if not set). Output: target Libtorch::torch, Libtorch_VERSION, Libtorch_WITH_CUDA and, if that is ON,
# target Libtorch::c10_cuda (its headers need CUDA's own).
if(NOT Python_EXECUTABLE)
  find_package(Python COMPONENTS Interpreter QUIET)
endif()
if(Python_EXECUTABLE AND NOT Libtorch_ROOT_DIR)
  # find_spec does not import torch, which would take seconds.
  execute_process(COMMAND ${Python_EXECUTABLE} -c
    "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE _torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(_torch_dir)
    set(Libtorch_ROOT_DIR ${_torch_dir} CACHE PATH "Folder of the torch Python package")
  endif()
endif()
find_path(Libtorch_INCLUDE_DIR torch/csrc/api/include/torch/torch.h PATHS ${Libtorch_ROOT_DIR}/include NO_DEFAULT_PATH)
find_library(Libtorch_CPU_LIBRARY torch_cpu PATHS ${Libtorch_ROOT_DIR}/lib NO_DEFAULT_PATH)
find_library(Libtorch_LIBRARY torch PATHS ${Libtorch_ROOT_DIR}/lib NO_DEFAULT_PATH)
find_library(Libtorch_C10_LIBRARY c10 PATHS ${Libtorch_ROOT_DIR}/lib NO_DEFAULT_PATH)
find_library(Libtorch_C10_CUDA_LIBRARY c10_cuda PATHS ${Libtorch_ROOT_DIR}/lib NO_DEFAULT_PATH)
if(Libtorch_ROOT_DIR AND EXISTS ${Libtorch_ROOT_DIR}/version.py)
  file(STRINGS ${Libtorch_ROOT_DIR}/version.py _torch_version REGEX "^__version__")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" Libtorch_VERSION "${_torch_version}")
endif()
include(FindPackageHandleStandardArgs)
set(FPHSA_NAME_MISMATCHED ON)
find_package_handle_standard_args(Libtorch REQUIRED_VARS Libtorch_LIBRARY Libtorch_CPU_LIBRARY Libtorch_C10_LIBRARY
                                  Libtorch_INCLUDE_DIR VERSION_VAR Libtorch_VERSION)
set(Libtorch_WITH_CUDA OFF)
if(Libtorch_FOUND AND Libtorch_C10_CUDA_LIBRARY)
  set(Libtorch_WITH_CUDA ON)
endif()
if(Libtorch_FOUND AND NOT TARGET Libtorch::torch)
  add_library(Libtorch::torch INTERFACE IMPORTED)
  target_include_directories(Libtorch::torch SYSTEM INTERFACE ${Libtorch_INCLUDE_DIR}
                             ${Libtorch_INCLUDE_DIR}/torch/csrc/api/include)
  # libstdc++ stands first: libtorch and libtorch_cpu of the wheels export parts of a newer libstdc++ (std::filesystem among them) that call
  # what only their own build has, and a program that found those before the real ones would jump to a null pointer.
  # libtorch holds nothing anyone refers to: it is what loads libtorch_cuda, and some linkers drop libraries nothing is taken from.
  target_link_libraries(Libtorch::torch INTERFACE
                        "-Wl,--push-state,--no-as-needed,-lstdc++,${Libtorch_LIBRARY},--pop-state"
                        ${Libtorch_CPU_LIBRARY} ${Libtorch_C10_LIBRARY})
  if(Libtorch_C10_CUDA_LIBRARY)
    add_library(Libtorch::c10_cuda INTERFACE IMPORTED)
    target_link_libraries(Libtorch::c10_cuda INTERFACE Libtorch::torch ${Libtorch_C10_CUDA_LIBRARY})
  endif()
endif()
mark_as_advanced(Libtorch_INCLUDE_DIR Libtorch_CPU_LIBRARY Libtorch_LIBRARY Libtorch_C10_LIBRARY Libtorch_C10_CUDA_LIBRARY)
