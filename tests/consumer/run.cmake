# cmake -D <variables below> -P run.cmake : installs the build to a folder, and configures, builds and runs the project beside this file
# against that installation alone.
foreach(variable BUILD_DIR WORK_DIR GENERATOR CXX_COMPILER)
  if(NOT DEFINED ${variable})
    message(FATAL_ERROR "run.cmake needs -D ${variable}=...")
  endif()
endforeach()

function(step name)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message("${output}")
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${name} failed: ${result}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
# Where the build found what the system lacks. By the environment: a list would be two arguments by the time it arrives.
set(ENV{CMAKE_PREFIX_PATH} "${DEPS}")
step("installing" ${CMAKE_COMMAND} --install ${BUILD_DIR} --component development --prefix ${WORK_DIR}/prefix)
step("configuring" ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${WORK_DIR}/build -G ${GENERATOR}
     -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=${CXX_COMPILER} "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}"
     -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix ${CONFIGURE_OPTIONS})
step("building" ${CMAKE_COMMAND} --build ${WORK_DIR}/build)
step("running" ${WORK_DIR}/build/consumer ${WORK_DIR}/store)
if(NOT output MATCHES "1000000000 rows, commit [1-9]")
  message(FATAL_ERROR "the consumer printed something else")
endif()
