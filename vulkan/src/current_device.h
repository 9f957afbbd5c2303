#ifndef KVQ_VULKAN_CURRENT_DEVICE_H_
#define KVQ_VULKAN_CURRENT_DEVICE_H_

namespace kvq {

// The device that TVM chose for this thread.
int CurrentDevice();

}  // namespace kvq

#endif  // KVQ_VULKAN_CURRENT_DEVICE_H_
