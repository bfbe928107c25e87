"""Choose among scored candidates (`PickerPlugin`)."""
