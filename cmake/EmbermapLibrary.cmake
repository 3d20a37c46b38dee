# embermap_add_library(<folder> SOURCES <...> [HEADERS <...>] [PUBLIC_DEPENDS <...>] [PRIVATE_DEPENDS <...>])
# A static library embermap_<folder> with alias embermap::<folder>, its public HEADERS installed under include/embermap/<folder>/, warnings
# private, exported for find_package(embermap). Paths are relative to the folder.
function(embermap_add_library folder)
  cmake_parse_arguments(ARG "" "" "SOURCES;HEADERS;PUBLIC_DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  set(target embermap_${folder})
  add_library(${target} STATIC ${ARG_SOURCES})
  add_library(embermap::${folder} ALIAS ${target})
  list(TRANSFORM ARG_HEADERS PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${ARG_HEADERS})
  # From outside: <embermap/store/table.hpp>. Our headers name each other from the root of the tree, which is include/embermap there.
  target_include_directories(${target} INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PUBLIC ${ARG_PUBLIC_DEPENDS} PRIVATE ${ARG_PRIVATE_DEPENDS})
  embermap_warnings(${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${folder} VERIFY_INTERFACE_HEADER_SETS ON)
  install(TARGETS ${target} EXPORT embermap-targets COMPONENT development
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
          FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/embermap COMPONENT development)
endfunction()

# Our own warnings, never those of whoever links us.
function(embermap_warnings target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wnon-virtual-dtor>
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${EMBERMAP_WERROR}>>:-Werror>)
endfunction()
