"""The `EndpointPickerConfig`: decoded strictly with every finding at once, built, checked, shown and
followed. Nothing here serves requests; what a plugin does with its parameters belongs to the plugin.
"""
