// Vulkan's functions, found in the loader library at run time: nothing links against it, and where it is
// missing there are simply no devices.
#ifndef KVQ_VULKAN_LOADER_H_
#define KVQ_VULKAN_LOADER_H_

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan.h>

#include <string>

// Functions that need no instance.
#define KVQ_VULKAN_GLOBAL_FUNCTIONS(F) \
  F(vkCreateInstance)                  \
  F(vkEnumerateInstanceVersion)

// Functions of an instance, or of any device of it.
#define KVQ_VULKAN_INSTANCE_FUNCTIONS(F)      \
  F(vkAllocateCommandBuffers)                 \
  F(vkAllocateDescriptorSets)                 \
  F(vkAllocateMemory)                         \
  F(vkBeginCommandBuffer)                     \
  F(vkBindBufferMemory)                       \
  F(vkCmdBindDescriptorSets)                  \
  F(vkCmdBindPipeline)                        \
  F(vkCmdCopyBuffer)                          \
  F(vkCmdDispatch)                            \
  F(vkCmdPipelineBarrier)                     \
  F(vkCmdPushConstants)                       \
  F(vkCreateBuffer)                           \
  F(vkCreateCommandPool)                      \
  F(vkCreateComputePipelines)                 \
  F(vkCreateDescriptorPool)                   \
  F(vkCreateDescriptorSetLayout)              \
  F(vkCreateDevice)                           \
  F(vkCreateFence)                            \
  F(vkCreatePipelineCache)                    \
  F(vkCreatePipelineLayout)                   \
  F(vkCreateShaderModule)                     \
  F(vkDestroyBuffer)                          \
  F(vkDestroyShaderModule)                    \
  F(vkEndCommandBuffer)                       \
  F(vkEnumerateDeviceExtensionProperties)     \
  F(vkEnumeratePhysicalDevices)               \
  F(vkFreeMemory)                             \
  F(vkGetBufferMemoryRequirements)            \
  F(vkGetDeviceQueue)                         \
  F(vkGetPhysicalDeviceFeatures2)             \
  F(vkGetPhysicalDeviceMemoryProperties2)     \
  F(vkGetPhysicalDeviceProperties)            \
  F(vkGetPhysicalDeviceProperties2)           \
  F(vkGetPhysicalDeviceQueueFamilyProperties) \
  F(vkMapMemory)                              \
  F(vkQueueSubmit)                            \
  F(vkResetCommandPool)                       \
  F(vkResetDescriptorPool)                    \
  F(vkResetFences)                            \
  F(vkUpdateDescriptorSets)                   \
  F(vkWaitForFences)

namespace kvq {

#define KVQ_VULKAN_DECLARE(name) extern PFN_##name name;
KVQ_VULKAN_GLOBAL_FUNCTIONS(KVQ_VULKAN_DECLARE)
KVQ_VULKAN_INSTANCE_FUNCTIONS(KVQ_VULKAN_DECLARE)
#undef KVQ_VULKAN_DECLARE

// Loads the loader library and the functions that need no instance; what is wrong, or nothing.
std::string LoadVulkan();

// Loads the functions of an instance.
void LoadInstanceFunctions(VkInstance instance);

}  // namespace kvq

#endif  // KVQ_VULKAN_LOADER_H_
