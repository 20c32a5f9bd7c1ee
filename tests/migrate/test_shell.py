"""A launch script is read as bash would run it, and nothing in it is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.errors import RecipeError
from recipes.migrate import shell

LAUNCH = "python3 -m verl.trainer.main_ppo"
SCRIPTS = Path(__file__).parent / "scripts"


def words(script, *arguments, **variables):
    """The arguments of the only launch, unknown pieces as <source>."""
    reading = shell.read(f"{script}\n", arguments, variables)
    (launch,) = reading.launches
    return [shell.fill(word, lambda n: f"<{reading.unknowns[n].source}>") for word in launch.arguments]


@pytest.mark.parametrize(
    ("before", "word", "expected"),
    [
        ("", "a='x y'", ["a=x y"]),
        ("", 'a="x\\"y"', ['a=x"y']),
        ("", "a=x\\ y", ["a=x y"]),
        ("", "a=$'x\\ty'", ["a=x\ty"]),
        ("", 'a=\'["c","w"]\'', ['a=["c","w"]']),
        ("", "a=1 \\\n  b=2", ["a=1", "b=2"]),
        ("", "a=1 # b=2", ["a=1"]),
        ("X=1", "a=$X b=${X} c='$X'", ["a=1", "b=1", "c=$X"]),
        ("X='1 2'", 'a=$X b="$X"', ["a=1", "2", "b=1 2"]),
        ("X='k=1 l=2'", "$X", ["k=1", "l=2"]),
        ("", 'a="" b=', ["a=", "b="]),
        ("", "a=${X:-3} b=${X-4} c=${X:+5}", ["a=3", "b=4", "c="]),
        ("X=", "a=${X:-3} b=${X-4} c=${X:+5} d=${X+6}", ["a=3", "b=", "c=", "d=6"]),
        ("Y=2", "a=${X:-${Y}0}", ["a=20"]),
        (": ${X:=7}", "a=$X", ["a=7"]),
        ("X=/m/Qwen3-8B", "a=${X##*/} b=${X%/*} c=${X#/m} d=${X//\\//_} e=${#X}", None),
        ('X="it\'s"', r"a=${X//\'/\\\'} b=${X//[[:punct:]st]/} c=${X//i?/-} d=${X/#it/_} e=${X/%s/_}", None),
        ("X=Abc", "a=${X,,} b=${X^^} c=${X:1} d=${X:0:2} e=${X/b/-}", ["a=abc", "b=ABC", "c=bc", "d=Ab", "e=A-c"]),
        ("X=3", "a=$((X * 2 + 1)) b=$(( (1 + 2) * X )) c=$((7 / 2)) d=$((-7 / 2)) e=$((2 ** 4))", None),
        ("A=(p 'q r' s)", '"${A[@]}" n=${#A[@]} f=${A[1]}', ["p", "q r", "s", "n=3", "f=q", "r"]),
        ("A=(p); A+=(q)", '"${A[@]}"', ["p", "q"]),
        ("A=()", '"${A[@]}" a=1', ["a=1"]),
        ("A=(x=1 # one\n # two\n y=2)", '"${A[@]}"', ["x=1", "y=2"]),
        ("X=a; X+=b", "a=$X", ["a=ab"]),
        ("X=1; unset X", "a=${X:-2}", ["a=2"]),
        ("D=/d; p=q; e=r", "a=$D/c/$p/$e-$p", ["a=/d/c/q/r-q"]),
        ("[ 1 -eq 1 ] && X=1 || X=2", "a=$X", ["a=1"]),
        ("[[ abc == a* && -z '' ]] || X=2", "a=${X:-1}", ["a=1"]),
        ("if [ a = b ]; then X=1; elif [ 3 -gt 2 ]; then X=2; else X=3; fi", "a=$X", ["a=2"]),
        ("for i in 1 2 3; do [ $i = 2 ] && continue; X=$X$i; done", "a=${X}", None),
        ("case x.yaml in *.yml|*.yaml) X=1;; *) X=2;; esac", "a=$X", ["a=1"]),
        ("f() { local y=$1; X=$y$2; }; f 1 2", "a=$X", ["a=12"]),
        ("IFS=, read -ra A <<<'p,q,'", '"${A[@]}"', ["p", "q"]),
        ("(X=1)", "a=${X:-2}", ["a=2"]),
        ("X=1; Y=X", "a=${!Y}", ["a=1"]),
    ],
)
def test_words_are_expanded_as_bash_does(before, word, expected, bash, tmp_path):
    script = f"{before}\n{LAUNCH} {word}\n"
    path = tmp_path / "script.sh"
    path.write_text(script)
    (ran,) = bash(path)
    ours = [w.replace("<$X>", "") for w in words(script)]
    assert ours == ran[3:]
    assert expected is None or ours == expected


def test_arguments_of_the_script_arrive():
    script = f'n=${{1:-2}}\nshift\n{LAUNCH} n=$n c=$# "$@" last=${{@:2}}'
    assert words(script) == ["n=2", "c=0", "last="]
    assert words(script, "4", "a b", "c") == ["n=4", "c=2", "a b", "c", "last=c"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a=$(date +%s)", "a=<$(date +%s)>"),
        ("a=`hostname`", "a=<`hostname`>"),
        ("a=$UNSET/x", "a=<$UNSET>/x"),
        ("a=$HOME/x", "a=<$HOME>/x"),
        ("a=$((UNSET + 1))", "a=<$((UNSET + 1))>"),
        ('a="run-$(whoami)-1"', "a=run-<$(whoami)>-1"),
        ("a=$?", "a=<$?>"),
    ],
)
def test_what_only_a_run_could_tell_is_marked_not_guessed(word, expected):
    assert words(f"{LAUNCH} {word}") == [expected]


def test_a_variable_that_is_told_is_known():
    assert words(f"{LAUNCH} a=$HOME b=${{N:-1}}", HOME="/h", N="3") == ["a=/h", "b=3"]


def test_nothing_is_executed(tmp_path):
    witness = tmp_path / "witness"
    for text in (f"touch {witness}", f"a=$(touch {witness})", f"a=`touch {witness}`", f"eval touch {witness}"):
        shell.read(f"{text}\n{LAUNCH} x=<(touch {witness}) y=$(touch {witness})\n")
    assert not witness.exists()


def test_a_block_that_may_or_may_not_run_is_noted_with_what_it_sets():
    reading = shell.read(f"X=1\nif [ -f /x ]; then X=2; Y=3; fi\n{LAUNCH} a=$X\n")
    (note,) = reading.notes
    assert (note.line, note.reason) == (2, "whether this runs is not known here; it sets X, Y")
    assert reading.doubtful == {"X": 2}
    assert reading.launches[0].arguments == ("a=1",)


def test_a_launch_in_such_a_block_is_found_and_says_where_it_stands():
    (launch,) = shell.read(f'if [ "$RANK" = 0 ]; then\n  {LAUNCH} a=1\nelse\n  ray start\nfi\n').launches
    assert (launch.line, launch.arguments) == (2, ("a=1",))
    assert launch.condition.startswith("if [")


def test_the_environment_of_the_launch_is_what_the_script_exports():
    script = f"A=1\nexport B=2 C\nC=3\ndeclare -x D=4\nE=5 {LAUNCH}\nexport F=6\n"
    assert shell.read(script).launches[0].environment == {"B": "2", "C": "3", "D": "4", "E": "5"}


@pytest.mark.parametrize(
    "command",
    [
        "python3 -u -m verl.trainer.main_ppo a=1",
        "nohup python -m verl.trainer.main_ppo a=1 > log 2>&1 &",
        "ray job submit --address x -- python3 -m verl.trainer.main_ppo a=1",
        "torchrun --nnodes 1 -m verl.trainer.main_ppo a=1",
        "exec env X=1 python3 -m verl.trainer.main_ppo a=1 | tee log",
        "python3 /opt/verl/verl/trainer/main_ppo.py a=1",
        "{ python3 -m verl.trainer.main_ppo a=1; } || exit 1",
    ],
)
def test_a_launch_is_found_whatever_stands_around_it(command):
    (launch,) = shell.read(f"{command}\n").launches
    assert (launch.module, launch.arguments) == ("verl.trainer.main_ppo", ("a=1",))


@pytest.mark.parametrize("module", ["verl.model_merger", "verl.trainer.main_eval", "torch.distributed.run", "pip"])
def test_other_programs_are_no_launch(module):
    assert shell.read(f"python3 -m {module} a=1\n").launches == ()


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("f() { f; }; f", "without end"),
        ("for a in " + "x " * 300 + "; do for b in " + "y " * 300 + "; do X=1; done; done", "steps"),
        ("X=aaaaaaaaaa\n" + "X=$X$X$X$X$X$X$X$X$X$X\n" * 9, "grows beyond"),
        ("a\0b", "null byte"),
        ("#" * 1_000_001, "characters"),
        (f"{LAUNCH} a=" + "$((" * 3000 + "1" + "))" * 3000, ""),
    ],
)
def test_a_hostile_script_ends_in_a_sentence_or_is_read_in_good_time(script, sentence):
    try:
        shell.read(script)
    except RecipeError as refused:
        assert sentence in str(refused)
    else:
        assert not sentence


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("one_command", ("trainer.seed=1",)),
        ("arrays", ("a=1", "b=2 3")),
        ("dapo_recipe", ()),
        ("mindspeed_old_names", ()),
        ("ray_job", ()),
        ("switches", ("x", "data.seed=2")),
        ("function", ()),
        ("two_launches", ()),
        ("fully_async", ()),
        ("unknown_keys", ()),
    ],
)
def test_real_looking_scripts_give_what_bash_gives(name, arguments, bash):
    path = SCRIPTS / f"{name}.sh"
    reading = shell.read(path.read_text(), arguments, {"HOME": "/home/me"})
    ran = [found for found in map(shell.launch_in, bash(path, arguments)) if found]
    assert [(launch.module, launch.arguments) for launch in reading.launches] == ran
