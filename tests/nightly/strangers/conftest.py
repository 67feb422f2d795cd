"""What the strangers' ranks need before they are forked."""

from meshpar.testing import PRELOAD
from tests.nightly.strangers import vision_operators

vision_operators.declared()
if not vision_operators.loadable():
    # The server from which ranks are forked would import transformers, and that torchvision, before anything could
    # declare its operators.
    PRELOAD[:] = [module_name for module_name in PRELOAD if not module_name.startswith("transformers")]
