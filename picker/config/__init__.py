"""The `EndpointPickerConfig`: decoded strictly, built, checked, shown and followed.

Every finding is reported at once. Nothing here serves requests; what a plugin does with its
parameters belongs to the plugin.
"""
