"""The devices of every test here: they are set before TensorFlow starts, which no test can wait for."""

from __future__ import annotations

try:
    import tensorflow as tf
except ImportError:  # the extra is not installed
    tf, collect_ignore_glob = None, ["*"]

REPLICAS = 4  # strategies of two and of four CPU devices are tested

if tf is not None:
    for processor in tf.config.list_physical_devices("CPU"):
        tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)  # torch's tests in this process need some of it too
