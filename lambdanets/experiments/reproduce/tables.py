"""All tables of the paper about networks, and their rows."""

from lambdanets.bench.memory import GB, MB
from lambdanets.experiments.reproduce import family_tables, resnet50_tables
from lambdanets.experiments.reproduce.rows import Row

UNITS = {"M": 1e6, "G": 1e9, "MB": MB, "GB": GB}
USUAL_UNITS = {"params": "M", "flops": "G", "memory": "GB"}

TABLES = {  # titles by LaTeX label in the paper's source, including paragraphs with numbers
    "tab:resnet50": "Layers in a ResNet-50",
    "tab:memory_comparison": "Lambda layers and self-attention",
    "tab:pseudo_labels": "Models trained on extra data",
    "tab:ablations": "Ablations of k, h and u in a ResNet-50",
    "tab:content_vs_position": "Content and position in a ResNet-50",
    "tab:scope_sizes": "Scopes in a ResNet-50",
    "tab:normalization": "Normalisations in a ResNet-50",
    "tab:hybrid_lambdanetworks": "Placement in a ResNet-50",
    "tab:c4_hybrid": "Lambda layers in c4 of LambdaResNets",
    "tab:parameter_efficient": "Parameters compared with EfficientNet-B6",
    "tab:flops_efficient": "FLOPs compared with EfficientNet-B6",
    "tab:mobilenets": "MobileNet-v2",
    "tab:pareto_curve_details": "LambdaResNets, detailed results",
    "text:introduction": "Introduction, footnote",
    "text:hybrid_attention": "Hybrid lambda vs attention, in LambdaResNet-420",
}

ROWS: tuple[Row, ...] = (*resnet50_tables.ROWS, *family_tables.ROWS)
DETECTION = family_tables.DETECTION


def unit(row: Row, quantity: str) -> tuple[str, float]:
    """Return the name and the size of the unit in which a row prints a quantity."""
    name = row.units.get(quantity, USUAL_UNITS[quantity])
    return name, UNITS[name]
