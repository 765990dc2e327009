"""Recipes: the table, equality, mixed and high precision, functions, and what is refused."""

import copy
import functools
import pickle

import pytest

from blockfp import patterns, recipes
from blockfp.recipes import HIGH_PRECISION, Cast

TABLE = {
    "fp8_delayed": ("fp8_e4m3", "fp8_e4m3", "fp8_e5m2"),
    "fp8_current": ("fp8_e4m3", "fp8_e4m3", "fp8_e5m2"),
    "fp8_block": ("fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e4m3_1x128"),
    "fp8_row": ("fp8_e4m3_row_pow2",) * 3,
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3_32x32", "mxfp8_e4m3"),
    "mxfp6": ("mxfp6_e3m2", "mxfp6_e3m2_32x32", "mxfp6_e3m2"),
    "mxfp4": ("mxfp4_e2m1", "mxfp4_e2m1_32x32", "mxfp6_e3m2"),
    "mxfp4_rotated": ("mxfp4_e2m1", "mxfp4_e2m1_32x32", "mxfp4_e2m1"),
    "nvfp4": ("nvfp4", "nvfp4_16x16", "nvfp4"),
    "nvfp4_4over6": ("nvfp4_4over6", "nvfp4_4over6_16x16", "nvfp4"),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name):
    recipe = recipes.parse(name)
    for operand, format in zip(("input", "weight", "gradient"), TABLE[name], strict=True):
        for direction in ("rowwise", "columnwise"):
            if name == "fp8_row" and (operand, direction) in recipes.PRODUCTS["dgrad"]:
                assert recipe.cast(operand, direction) == HIGH_PRECISION
                continue
            if name == "nvfp4_4over6" and (operand, direction) == ("input", "columnwise"):
                assert recipe.cast(operand, direction) == recipes.nvfp4().input_columnwise
                continue
            assert recipe.cast(operand, direction).format.name == format
    assert recipe.fast_accum == {"forward"}
    assert (recipe.delayed is not None) == (name == "fp8_delayed")
    assert recipe == recipes.parse(name) == copy.deepcopy(recipe) == pickle.loads(pickle.dumps(recipe))
    assert hash(recipe) == hash(recipes.RECIPES[name]())


def test_the_text_says_all_but_name_and_delayed_scaling():
    mixed = recipes.mxfp8().replace(gradient=Cast("fp8_e5m2_1x128", stochastic=True), weight=HIGH_PRECISION, fast_accum=())
    for recipe in (
        *map(recipes.parse, TABLE),
        mixed,
        recipes.fp8_current(eps=1e-3),
        recipes.for_linear("nvfp4", "high_precision"),
    ):
        again = recipes.Recipe.of_text(recipe.text)
        assert again == recipe.replace(name=again.name, delayed=None)
        assert again.text == recipe.text == pickle.loads(pickle.dumps(recipe)).text
    assert recipes.fp8_current().text == recipes.fp8_delayed().text != recipes.fp8_current(eps=1e-3).text


def test_only_some_rotate_and_round_stochastically():
    for name in TABLE:
        recipe = recipes.parse(name)
        casts = {(o, d): recipe.cast(o, d) for o in ("input", "weight", "gradient") for d in ("rowwise", "columnwise")}
        stochastic = {where for where, cast in casts.items() if cast.stochastic}
        rotated = {where for where, cast in casts.items() if cast.rotate}
        if name in ("nvfp4", "nvfp4_4over6", "mxfp4_rotated"):
            assert stochastic == {("gradient", "rowwise"), ("gradient", "columnwise")}
            assert rotated == {("gradient", "columnwise"), ("input", "columnwise")}
        else:
            assert not stochastic | rotated


def test_options():
    delayed = recipes.fp8_delayed(history=16, margin=1, algorithm="most_recent").delayed
    assert (delayed.history, delayed.margin, delayed.algorithm) == (16, 1, "most_recent")
    assert recipes.fp8_delayed().delayed == recipes.Delayed(1024, 0, "max")
    assert recipes.fp8_current(eps=1e-6) != recipes.fp8_current()
    for bad in ({"history": 0}, {"margin": 1000}, {"algorithm": "median"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            recipes.fp8_delayed(**bad)
    for bad in ({"history": 1.5}, {"history": "a"}, {"margin": 0.5}):
        with pytest.raises(TypeError, match=f"{next(iter(bad))} must be an integer, got"):
            recipes.fp8_delayed(**bad)
    for eps, error in ((-1.0, ValueError), (1e39, ValueError), (float("nan"), ValueError), ("1", TypeError)):
        with pytest.raises(error, match="eps must be"):
            recipes.fp8_block(eps=eps)
    with pytest.raises(ValueError, match="products"):
        recipes.mxfp8().replace(fast_accum={"backward"})


def test_mixed_and_high_precision():
    mixed = recipes.mxfp8().replace(gradient=Cast("fp8_e5m2"), input_columnwise=HIGH_PRECISION)
    assert mixed.gradient.format.name == mixed.gradient_columnwise.format.name == "fp8_e5m2"
    assert mixed.input.format.name == "mxfp8_e4m3"
    assert mixed.input_columnwise.format is None
    one_dimensional = recipes.mxfp8().replace(weight=Cast("mxfp8_e4m3"))
    assert one_dimensional.weight_columnwise == HIGH_PRECISION


def test_what_is_refused():
    with pytest.raises(ValueError, match="square"):
        recipes.mxfp8().replace(weight=Cast("mxfp8_e4m3"), weight_columnwise=Cast("mxfp8_e4m3"))
    with pytest.raises(ValueError, match="rotate both"):
        recipes.mxfp8().replace(input_columnwise=Cast("mxfp8_e4m3", rotate=True))
    for option in ("stochastic", "rotate"):
        with pytest.raises(ValueError, match="high precision"):
            Cast(None, **{option: True})
    with pytest.raises(ValueError, match="mxfp9"):
        Cast("mxfp9")
    with pytest.raises(ValueError, match="choose one of fp8_delayed"):
        recipes.parse("mxfp9")
    with pytest.raises(TypeError, match="Recipe or its name"):
        recipes.parse(3)
    for name, message in (("input_columnwise", "input columnwise"), ("gradient", "gradient"), ("weight", "weight")):
        for value in ("mxfp8_e4m3", None):
            with pytest.raises(TypeError, match=f"{message} must be a Cast"):
                recipes.mxfp8().replace(**{name: value})
    with pytest.raises(TypeError, match="delayed must be"):
        recipes.fp8_current().replace(delayed=3)
    for name in ("exact_products", "exact_order"):
        with pytest.raises(TypeError, match=f"{name} must be True or False"):
            recipes.mxfp8().replace(**{name: 1})
    with pytest.raises(TypeError, match="fast_accum must be a set of products"):
        recipes.mxfp8().replace(fast_accum="forward")
    for where in (("input", "column"), ("inputs", "rowwise")):
        with pytest.raises(
            ValueError, match="operand and direction must be of input, weight, gradient, each rowwise and columnwise, got"
        ):
            recipes.mxfp8().cast(*where)


def test_names_that_are_no_recipes():
    for name, hint in (
        ("nvfp4_4over6_448", r"; it is a format, for which recipes\.qat\('nvfp4_4over6_448'\) fine-tunes$"),
        (recipes.qat("nvfp4").name, r"; give the Recipe that recipes\.qat\(\.\.\) returns$"),
        ("mxfp9", "w4a8$"),
    ):
        with pytest.raises(ValueError, match=hint):
            recipes.parse(name)


def test_a_recipe_by_path():
    choose = {"layers.0": "mxfp8", "layers.1": recipes.nvfp4(), "layers.2": "mxfp9", "layers.3": 3}.get
    assert recipes.resolve(choose, "layers.0") == recipes.resolve("mxfp8", "layers.0") == recipes.mxfp8()
    assert recipes.resolve(choose, "layers.1") == recipes.resolve(recipes.nvfp4(), "x") == recipes.nvfp4()
    assert recipes.resolve(choose, "head") is None
    with pytest.raises(ValueError, match=r"recipe for 'layers\.2': recipe 'mxfp9' is not known"):
        recipes.resolve(choose, "layers.2")
    with pytest.raises(TypeError, match=r"recipe for 'layers\.3': recipe must be a Recipe or its name"):
        recipes.resolve(choose, "layers.3")


def test_a_recipe_by_pattern():
    mapping = {r"^layers\.[03]\.": None, "down$": "mxfp8", "": recipes.nvfp4()}
    for path, expected in (
        ("layers.0.up", None),
        ("layers.3.down", None),
        ("layers.30.up", recipes.nvfp4()),
        ("layers.1.down", recipes.mxfp8()),
        ("head", recipes.nvfp4()),
    ):
        assert recipes.resolve(mapping, path) == expected
    assert recipes.resolve({"up": "mxfp8"}, "head") is None
    with pytest.raises(ValueError, match=r"recipe for 'head': recipe 'mxfp9' is not known"):
        recipes.resolve({"": "mxfp9"}, "head")
    with pytest.raises(ValueError, match=r"recipe: '\(' is not a regular expression for layer names"):
        recipes.resolve({"(": "mxfp8"}, "head")
    with pytest.raises(TypeError, match="patterns of layers' names must be strings, got int: 3"):
        recipes.resolve({3: "mxfp8"}, "head")
    recipes.check_paths(mapping, ["layers.0.up", "layers.1.down"])
    with pytest.raises(ValueError, match=r"pattern 'donw' matches no convertible layer; paths are 'up', 'down'"):
        recipes.check_paths({"donw": None, "": "mxfp8"}, ["up", "down"])
    with pytest.raises(ValueError, match="pattern 'down' follows '', which matches every path: put '' last"):
        recipes.check_paths({"": "mxfp8", "down": None}, ["up", "down"])


def test_first_and_last_blocks_in_high_precision():
    mapping = recipes.ends_in_high_precision("nvfp4", "model.layers", 12, end=2)
    left = [i for i in range(12) if recipes.resolve(mapping, f"model.layers.{i}.mlp.up") is None]
    assert left == [0, 10, 11]
    for path in ("model-layers.0.up", "other.model.layers.0.up", "model.layers.1.layers.0.up", "lm_head"):
        assert recipes.resolve(mapping, path) == recipes.nvfp4()
    assert list(recipes.ends_in_high_precision("nvfp4", "layers", 3, start=0, end=0)) == [""]
    with pytest.raises(ValueError, match=r"end must be in 0\.\.count, got 4 of 3 blocks"):
        recipes.ends_in_high_precision("nvfp4", "layers", 3, end=4)
    with pytest.raises(TypeError, match=r"start must be an integer, got float: 1\.5"):
        recipes.ends_in_high_precision("nvfp4", "layers", 3, start=1.5)
    with pytest.raises(ValueError, match="mxfp9"):
        recipes.ends_in_high_precision("mxfp9", "layers", 3)


def test_quantization_aware_fine_tuning():
    weights = recipes.qat("mxfp4_e2m1")
    assert (weights.name, weights.weight.format.name) == ("qat(mxfp4_e2m1)", "mxfp4_e2m1")
    both = recipes.qat("nvfp4", "nvfp4")
    assert (both.name, both.input.format.name) == ("qat(nvfp4, nvfp4)", "nvfp4")
    for recipe in (weights, both):
        rest = ("input_columnwise", "weight_columnwise", "gradient", "gradient_columnwise")
        assert {getattr(recipe, name) for name in rest} == {HIGH_PRECISION}
        assert recipes.for_linear(recipe) == recipe
    assert weights.input == HIGH_PRECISION
    with pytest.raises(ValueError, match="mxfp9"):
        recipes.qat("mxfp9")
    with pytest.raises(TypeError, match="weight must be a Format or its name, got None"):
        recipes.qat(None)


def test_a_recipe_by_operand():
    def choose(path, operand, direction):
        if path.startswith("head"):
            return None
        if operand == "weight":
            return "mxfp8_e4m3_32x32"
        return Cast("mxfp8_e5m2") if operand == "gradient" else "mxfp8_e4m3"

    by_path = recipes.by_operand(choose)
    assert recipes.resolve(by_path, "head") is None
    body = recipes.resolve(by_path, "layers.0")
    assert body.gradient.format.name == "mxfp8_e5m2"
    assert body == recipes.resolve(by_path, "layers.0")
    with pytest.raises(ValueError, match=r"'layers\.1', input rowwise.*mxfp9"):
        recipes.resolve(recipes.by_operand(lambda *_: "mxfp9"), "layers.1")
    with pytest.raises(ValueError, match=r"'layers\.2'.*square"):
        recipes.resolve(recipes.by_operand(lambda *_: "mxfp8_e4m3"), "layers.2")


def test_what_a_linear_layer_runs():
    delayed = recipes.fp8_delayed()
    assert recipes.for_linear(delayed) is delayed
    high = recipes.for_linear(delayed, "high_precision")
    assert high.delayed is None
    assert high.input == high.gradient_columnwise == HIGH_PRECISION
    assert high.weight == delayed.weight
    turned, plain = Cast("mxfp8_e4m3", rotate=True), Cast("mxfp8_e4m3")
    rotated = recipes.mxfp8().replace(input=turned, input_columnwise=plain, weight=turned, weight_columnwise=HIGH_PRECISION)
    for message, recipe in (
        ("input rowwise is stochastic, but only gradients", recipes.mxfp8().replace(input=Cast("mxfp8_e4m3", stochastic=True))),
        ("only the operands of the weight gradient are rotated", rotated),
        ("delayed scaling keeps one scale for the gradient", delayed.replace(gradient=Cast("mxfp8_e5m2"))),
        (
            "delayed scaling rounds the gradient unrotated and to nearest",
            delayed.replace(gradient=Cast("fp8_e5m2", stochastic=True)),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            recipes.for_linear(recipe)
    with pytest.raises(ValueError, match="compute must be"):
        recipes.for_linear("mxfp8", "fast")


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_named_recipe_is_made_once_and_fits_a_linear_layer(name):
    assert recipes.parse(name) is recipes.parse(name)
    assert recipes.for_linear(name) is recipes.parse(name)
    assert recipes.for_linear(recipes.RECIPES[name]()) == recipes.parse(name)


class Layer:
    def __init__(self, width):
        self.width = width


LAYERS = [("layers.0.up", Layer(4)), ("layers.1.up", Layer(8)), ("head", Layer(8))]


@pytest.mark.parametrize(
    "filter_fn",
    [
        lambda path, layer: path != "head",
        lambda module, fqn: fqn != "head",
        lambda mod, name: name != "head" and mod.width > 1,
        lambda m, n: n != "head",
        lambda n, m: n != "head",
        lambda _, fqn: fqn != "head",
        lambda mod, _: mod is not LAYERS[2][1],
        lambda _, layer: layer is not LAYERS[2][1],
        lambda a, b: a != "head",
        lambda a, b: b is not LAYERS[2][1],
        lambda *both: both[0] != "head",
        functools.partial(lambda module, fqn, skip: fqn not in skip, skip=["head"]),
        functools.partial(lambda path, layer, skip: path not in skip, skip=["head"]),
    ],
)
def test_a_filter_takes_path_and_layer_in_the_order_that_its_parameters_say(filter_fn):
    assert patterns.select(filter_fn, LAYERS) == [True, True, False]


def test_a_filters_annotation_says_which_is_the_path():
    def chosen(a, b: str) -> bool:
        return b != "head"

    assert patterns.select(chosen, LAYERS) == [True, True, False]


@pytest.mark.parametrize(
    "filter_fn", [lambda a, b: b != "head", lambda a, b: b not in {"head"}, lambda *both: both[1] != "head"]
)
def test_a_filter_that_would_silently_take_all_in_one_order_is_refused(filter_fn):
    with pytest.raises(
        TypeError, match=r"called with layer and path, .* would leave some: name its parameters \(path, layer\)"
    ):
        patterns.select(filter_fn, LAYERS)


@pytest.mark.parametrize("filter_fn", [lambda a, b: True, lambda a, b: len(a) < 99, lambda a, b: isinstance(b, Layer), None])
def test_a_filter_may_take_all(filter_fn):
    assert patterns.select(filter_fn, LAYERS) == [True] * 3


def test_an_error_of_a_filter_says_how_it_was_called():
    with pytest.raises(AttributeError) as raised:
        patterns.select(lambda a, b: b.startswith("layers"), LAYERS)
    assert raised.value.__notes__ == ["filter_fn, called with path and layer, raised this for 'layers.0.up'"]
    with pytest.raises(TypeError, match="filter_fn must be a function of a layer's path and of the layer, got 'head'"):
        patterns.select("head", LAYERS)


def test_a_misspelt_recipe_is_told_its_neighbours():
    with pytest.raises(
        ValueError, match=r"recipe 'mxpf8' is not known; did you mean 'mxfp8'( or '\w+')?\? Or choose one of fp8_"
    ):
        recipes.parse("mxpf8")
    with pytest.raises(ValueError, match="did you mean 'mxfp8'"):
        recipes.parse("MXFP8")
    with pytest.raises(ValueError, match="recipe 'int4' is not known; choose one of fp8_delayed"):
        recipes.parse("int4")


def test_filter_is_told_its_name():
    @patterns.takes_filter
    def convert(model, *, filter_fn=None):
        return filter_fn

    assert convert(1, filter_fn=2) == 2
    with pytest.raises(TypeError, match=r"convert\(\) takes filter_fn=, a function of path and layer, and no filter="):
        convert(1, filter=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'filters'"):
        convert(1, filters=2)


def test_options_of_nvfp4_recipes():
    """Guarded gradients, and the choice of 4-over-6's authors; all else stays, and so does the name."""
    plain, guarded = recipes.nvfp4(), recipes.nvfp4(guarded=True)
    assert str(guarded.gradient.format) == str(guarded.gradient_columnwise.format) == "nvfp4_guarded"
    back = {"gradient": plain.gradient, "gradient_columnwise": plain.gradient_columnwise}
    assert guarded != plain
    assert guarded.replace(**back) == plain
    assert guarded.gradient_columnwise.rotate
    assert guarded.gradient.stochastic
    squared = recipes.nvfp4_4over6(squared_errors=True)
    assert [str(cast.format) for cast in (squared.input, squared.weight)] == ["nvfp4_4over6_mse", "nvfp4_4over6_mse_16x16"]
    assert squared.input_columnwise == plain.input_columnwise
    assert squared.gradient == plain.gradient
