"""All tables of the paper with numbers of networks, and their rows."""

from lambdanets.bench.memory import GB, MB
from lambdanets.experiments.reproduce import family_tables, resnet50_tables
from lambdanets.experiments.reproduce.rows import Row, Table

UNITS = {"M": 1e6, "G": 1e9, "MB": MB, "GB": GB}
USUAL_UNITS = {"params": "M", "flops": "G", "memory": "GB"}

TABLES = {
    table.name: table
    for table in (
        Table(name="tab:resnet50", title="Layers in a ResNet-50"),
        Table(name="tab:memory_comparison", title="Lambda layers and self-attention"),
        Table(name="tab:pseudo_labels", title="Models trained on extra data"),
        Table(name="tab:ablations", title="Ablations of k, h and u in a ResNet-50"),
        Table(name="tab:content_vs_position", title="Content and position in a ResNet-50"),
        Table(name="tab:scope_sizes", title="Scopes in a ResNet-50"),
        Table(name="tab:normalization", title="Normalisations in a ResNet-50"),
        Table(name="tab:hybrid_lambdanetworks", title="Placement in a ResNet-50"),
        Table(name="tab:c4_hybrid", title="Lambda layers in c4 of LambdaResNets"),
        Table(name="tab:parameter_efficient", title="Parameters beside EfficientNet-B6"),
        Table(name="tab:flops_efficient", title="FLOPs beside EfficientNet-B6"),
        Table(name="tab:mobilenets", title="MobileNet-v2"),
        Table(name="tab:pareto_curve_details", title="LambdaResNets, detailed results"),
        Table(name="text:introduction", title="Introduction, footnote"),
        Table(name="text:hybrid_attention", title="Hybrid lambda vs attention, in LambdaResNet-420"),
    )
}

ROWS: tuple[Row, ...] = (*resnet50_tables.ROWS, *family_tables.ROWS)
DETECTION = family_tables.DETECTION


def unit(row: Row, quantity: str) -> tuple[str, float]:
    """The unit in which a row prints a quantity: its name, and how much it is."""
    name = row.units.get(quantity, USUAL_UNITS[quantity])
    return name, UNITS[name]
