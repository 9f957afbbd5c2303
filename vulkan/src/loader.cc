#include "loader.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace kvq {

#define KVQ_VULKAN_DEFINE(name) PFN_##name name;
KVQ_VULKAN_GLOBAL_FUNCTIONS(KVQ_VULKAN_DEFINE)
KVQ_VULKAN_INSTANCE_FUNCTIONS(KVQ_VULKAN_DEFINE)
#undef KVQ_VULKAN_DEFINE

namespace {

PFN_vkGetInstanceProcAddr get_proc_address;

#ifdef _WIN32
constexpr const char* kLibraries[] = {"vulkan-1.dll"};
void* FindEntry(const char* library) {
  HMODULE module = LoadLibraryA(library);
  return module ? reinterpret_cast<void*>(GetProcAddress(module, "vkGetInstanceProcAddr")) : nullptr;
}
#else
constexpr const char* kLibraries[] = {"libvulkan.so.1", "libvulkan.so"};  // Android has the second name
void* FindEntry(const char* library) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  return handle ? dlsym(handle, "vkGetInstanceProcAddr") : nullptr;
}
#endif

}  // namespace

std::string LoadVulkan() {
  void* entry = nullptr;
  for (const char* library : kLibraries) {
    if (!entry) entry = FindEntry(library);
  }
  if (!entry) {
    return std::string(kLibraries[0]) + " cannot be loaded: install the Vulkan loader (Debian: libvulkan1) " +
           "and a driver (Debian: mesa-vulkan-drivers)";
  }
  get_proc_address = reinterpret_cast<PFN_vkGetInstanceProcAddr>(entry);
#define KVQ_VULKAN_LOAD(name) \
  name = reinterpret_cast<PFN_##name>(get_proc_address(VK_NULL_HANDLE, #name));
  KVQ_VULKAN_GLOBAL_FUNCTIONS(KVQ_VULKAN_LOAD)
#undef KVQ_VULKAN_LOAD
  return vkEnumerateInstanceVersion ? "" : "the Vulkan loader is of Vulkan 1.0: 1.2 is needed";
}

void LoadInstanceFunctions(VkInstance instance) {
#define KVQ_VULKAN_LOAD(name) name = reinterpret_cast<PFN_##name>(get_proc_address(instance, #name));
  KVQ_VULKAN_INSTANCE_FUNCTIONS(KVQ_VULKAN_LOAD)
#undef KVQ_VULKAN_LOAD
}

}  // namespace kvq
