# find_package(astraflow) gives the target astraflow::client.
include(CMakeFindDependencyMacro)
find_dependency(PkgConfig)
pkg_check_modules(GRPC REQUIRED IMPORTED_TARGET grpc++ protobuf)
include("${CMAKE_CURRENT_LIST_DIR}/astraflowTargets.cmake")
