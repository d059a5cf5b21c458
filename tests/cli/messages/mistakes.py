"""Mistakes of users, a line each: the command, the exit code, and words that its one message must contain.

Words say what is wrong, where, why, and what would work. ``{...}`` are files of the fixture in ``test_mistakes.py``.
The command is given the recipe and its overrides, unless it brings a recipe of its own.
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    """A mistake.

    Attributes:
        name: the mistake, in words.
        command: the arguments, separated by spaces; RECIPE stands for a good recipe and its overrides.
        says: texts that the message must contain.
        code: exit code.
    """

    name: str
    command: str
    says: tuple[str, ...]
    code: int = 2


def _check(name: str, override: str, *says: str) -> Mistake:
    return Mistake(name, f"check RECIPE {override}", says)


FIELDS = (
    _check("misspelled section", "trainig.steps=4", "trainig: there is no such field", "Did you mean 'training'?"),
    _check("section of another program", "train.steps=3", "train: there is no", "Here it is training: write", "steps"),
    _check("kind for a section", "optimizer=adamw", "optimizer = 'adamw'", "Write optimizer: {kind: adamw}."),
    _check("a field of several sections", "every_steps=3", "write checkpoint.every_steps, evaluation.every_steps or"),
    _check("misspelled field", "optimizer.learning_rate=1", "optimizer.learning_rate", "Here it is optimizer.lr."),
    _check("text for a whole number", "training.steps=many", "training.steps = 'many'", "as in 100, 100M or 1e9"),
    _check("text for a number", "optimizer.lr=three", "optimizer.lr = 'three': must be a number", "Peak learning rate"),
    _check("half a step", "training.steps=1.5", "training.steps = 1.5: must be a whole number"),
    _check("millions or minutes", "training.steps=3m", "3m may mean millions or minutes", "write 3M"),
    _check("4K tokens", "data.sequence_length=4K", "may mean 4,000 or 4,096", "write 4000 or 4Ki"),
    _check("GB or GiB", "data.cache_gib=20G", "20G may mean 20GB or 20GiB"),
    _check("minutes or months", "recovery.deadline_seconds=3m", "minutes, months or millions", "write 3min"),
    _check("share above one", "data.validation.fraction=120%", "data.validation.fraction = 1.2", "less than 1"),
    _check("share for a count", "training.steps=80%", "80% is a share, and a number is expected"),
    _check("yes for a number", "training.steps=yes", "training.steps = 'true': must be a whole number"),
    _check("maybe", "data.shuffle=maybe", "data.shuffle = 'maybe': must be true or false"),
    _check("infinite", "optimizer.lr=.inf", "optimizer.lr = inf: must be a finite number"),
    _check("negative", "optimizer.lr=-1", "optimizer.lr = -1: must be greater than 0"),
    _check("precision of torch", "precision.mode=bfloat16", "precision.mode = 'bfloat16'", "'bf16-sr'", "mixed"),
    _check("close to a value", "data.mode=onlin", "data.mode = 'onlin'", "Did you mean 'online'?"),
    _check("optimizer by name", "optimizer.name=adam", "optimizer.name: there is no", "it is optimizer.kind"),
    _check("unknown optimizer", "optimizer.kind=sgd", "kind = 'sgd': there is no such kind. Known: adamw, muon."),
    _check(
        "unknown scaling",
        "model.rope.scaling={kind: longrope}",
        "scaling.kind = 'longrope': there is no such",
        "linear, dynamic, yarn, llama3",
    ),
    _check(
        "half a scaling",
        "model.rope.scaling.kind=dynamic model.rope.scaling.factor=2",
        "model.rope.scaling.original_max_position: is required. It means: Longest sequence that is not scaled",
    ),
    _check("name with a space", "run.name=my\u00a0run!", "run.name = ", "letters, digits, dot, dash and underscore"),
    _check(
        "tokenizer by name", "data.tokenizer=gpt2", ": 1 problem", "has an owner, as in data.tokenizer.path=openai-"
    ),
    _check("tokenizer by file", "data.tokenizer=/a/b.json", ": 1 problem", "Write tokenizer: {path: /a/b.json}."),
    _check("None for a section", "data.validation=None", ": 1 problem", "data.validation.fraction=0 to keep nothing"),
    _check("null for a section", "data.validation=null", ": 1 problem", "data.validation.fraction=0 to keep nothing"),
    _check(
        "None for a path", "data.prepared_dir=None", ": 1 problem", "YAML has null", "Write data.prepared_dir=null."
    ),
    _check("None for a number", "optimizer.lr=None", ": 1 problem", "Leave it out for its default."),
    _check("None for layers", "model.layers=None", "model.layers: is the text None;", "A value is required here"),
    _check("None for a corpus", "data.path=None", ": 1 problem", "Give a value, or data.sources instead."),
    _check("None for a length", "training.steps=None", ": 1 problem", "Give a value, or training.tokens instead."),
    _check("None for a beta", "optimizer.betas=[0.9,None]", ": 1 problem", "Remove it, or give a value."),
    _check("None for a preset", "model.preset=None", ": 1 problem", "Write model.preset=null."),
    _check("one beta", "optimizer.betas=0.9", "optimizer.betas = 0.9: must be a list", "Decay rates"),
    _check("no number of 30 digits", f"training.seed={'9' * 30}", "about 30 digits", "below 2**63"),
)
MODEL = (
    _check(
        "preset, nearly",
        "model.preset=llama2-7b",
        "no such preset",
        "The nearest are llama-2-7b, ",
        "hlat recipe presets",
    ),
    _check("hub id as preset", "model.preset=Qwen/Qwen3-8B", "no such preset", "The nearest are qwen3-8b, qwen3-"),
    _check("config.json not there", "model.hf_config=nowhere", "model.hf_config = 'nowhere'", "config.json"),
    _check(
        "heads do not divide",
        "model.heads=5",
        "model.heads = 5",
        "hidden_size 32 is not a multiple",
        "Try 2 or 4 heads",
    ),
    _check("kv heads do not divide", "model.kv_heads=3", "model.kv_heads = 3", "shared out evenly", "Try 2 or 4"),
    _check("longer than the model", "model.max_sequence_length=16", "declared for 16 tokens", "Use at most 16"),
    _check("vocabulary of 200", "data.tokenizer.vocab_size=200", "256 bytes and an end-of-text token", "257 or more"),
    _check("vocabulary above the model", "model.vocab_size=300", "vocab_size = 320: exceeds the 300 rows"),
)
LAYOUT = (
    Mistake(
        "three processes", "check RECIPE --nproc 3", ("batch.global_batch = 8", "multiple of 12", "1 or 2 processes.")
    ),
    _check("tensor 3", "parallel.tensor=3", "parallel.tensor = 3", "heads 4 cannot be shared", "Try 2 or 4"),
    _check(
        "pipeline of too many", "parallel.pipeline=4", "parallel.pipeline = 4", "each stage needs a layer", "Try 1 or 2"
    ),
    Mistake(
        "a rehearsal of three",
        "rehearse RECIPE parallel.tensor=2 --world 3",
        ("Try 2 or 4 processes", "The number of processes is set by --world."),
    ),
    Mistake(
        "a check of three",
        "check RECIPE parallel.tensor=2 --world 3",
        ("Try 2 or 4 processes", "The number of processes is set by --nproc or --world."),
    ),
    Mistake("train, 3 processes", "train RECIPE --nproc 3", ("batch.global_batch = 8", "Try")),
    Mistake("no number of processes", "train RECIPE --nproc many", ("--nproc many", "a range as in 2:8")),
)
RUN = (
    _check("no length", "training.steps=null", "training", "steps", "tokens"),
    _check("both lengths", "training.tokens=1M", "training", "steps", "tokens"),
    _check("warm-up longer", "schedule.warmup_steps=50", "schedule.warmup_steps = 50", "Use at most 39."),
    _check("warm-up longer still", "schedule.warmup_steps=90 training.steps=80", "Use at most 79; 2 would be 2.5 %."),
    _check("batch of nothing", "batch.global_batch=0", "batch.global_batch = 0: must be greater than 0"),
    _check("batch not divisible", "batch.micro_batch=3", "batch.micro_batch = 3", "not a multiple of it", "Try 2 or 4"),
    Mistake("faults not allowed", "train RECIPE faults=[{kind:kill,at_step:1}]", ("faults", "kind")),
)
FILES = (
    _check(
        "no such corpus", "data.path=nope.txt", "data.path = 'nope.txt': no such file or folder (looked in ", "start"
    ),
    _check("no match", "data.path=*.nope", "data.path = '*.nope': no file matches this glob", "**"),
    _check(
        "hub id as corpus",
        "data.path=HuggingFaceFW/fineweb",
        "Hugging Face Hub",
        "hf://datasets/HuggingFaceFW/fineweb",
        "hf download",
        "--repo-type",
    ),
    _check("hub id as tokenizer", "data.tokenizer.path=Qwen/Qwen3-8B", "Hub", "hf download Qwen/Qwen3-8B"),
    _check("hub id as weights", "checkpoint.init_from=Qwen/Qwen3-8B", "Hub", "hf download Qwen/Qwen3-8B"),
    _check("hub URL offline", "data.path=https://nowhere.invalid/x.txt", "does not resolve", "copy the files"),
    _check("credentials in a URL", "data.path=s3://me:word@bucket/x", "data.path", "credentials come from the env"),
    _check("wrong column", "data.path={rows} data.text_column=body", "line 1: no column 'body'; it has text, id"),
    _check(
        "wrong column of parquet", "data.path={parquet} data.text_column=body", "no column 'body'", "text_column to one"
    ),
    _check("broken rows", "data.path={broken_rows}", "line 1: invalid JSON", "one JSON object"),
    _check("damaged parquet", "data.path={damaged}", "parquet", "truncated or damaged", "again"),
    _check("a spreadsheet", "data.path={xlsx}", "hlat does not read .xlsx files", "Convert it to parquet or jsonl"),
    _check("an archive", "data.path={zip}", "hlat does not read .zip files", "Unpack it first"),
    _check("an empty folder", "data.path={empty_folder}", "the folder contains no files"),
    _check("no such tokenizer", "data.tokenizer.path=nope.json", "no such tokenizer", "set it to null to train one"),
    _check("an id without an owner", "data.tokenizer.path=gpt2", "its id has an owner, as in openai-community/gpt2"),
    _check("weights of torch.save", "checkpoint.init_from={short}", "this is a file", "`hlat import FOLDER` reads"),
    _check(
        "no validation text",
        "data.path={rows} data.validation.by=document",
        "none of the 2 documents is chosen for validation",
        "by=auto",
    ),
    _check("no tokenizer", "data.tokenizer.path={rows}", "data.tokenizer.path", "not a tokenizer"),
    _check(
        "tokenizer too large", "data.tokenizer.path={tokenizer} model.vocab_size=200", "the model only 200", "at least"
    ),
    _check("no such set", "evaluation.sets.law=nope", "evaluation.sets.law = 'nope': no such file or folder"),
    _check(
        "no such task", "evaluation.tasks=[nope.jsonl]", "evaluation.tasks.0 = 'nope.jsonl'", "hlat evaluate --render"
    ),
    _check("sequence longer than text", "data.path={short} data.sequence_length=4096", "at most 6 tokens", "more text"),
    _check(
        "rows shorter than a sequence",
        "data.path={rows} data.validation.fraction=0",
        "the corpus of 50 bytes has at most 8 tokens: too few for one sample of 32 tokens",
    ),
    _check(
        "nothing but a tail",
        "data.path={fifty} data.validation.by=tail data.validation.fraction=0.5",
        "at most 26 tokens without its validation text",
        "a smaller data.validation.fraction",
    ),
    _check(
        "few tokens of a tokenizer",
        "data.path={fifty} data.validation.fraction=0 data.tokenizer.path={tokenizer}",
        "the corpus of 50 bytes has at most 11 tokens",
    ),
    _check("run folder is a file", "run.dir={short}", "is a file, so no folder can be there", "another run.dir"),
    _check("run folder in /proc", "run.dir=/proc/x", "run.dir", "/proc", "another run.dir"),
    _check("cuda", "run.device=cuda", "run.device = 'cuda': this machine has no cuda device", "run.device=auto"),
    _check("fp8 on a CPU", "precision.mode=fp8", "no fp8 products on a CPU", "Use precision.mode=mixed"),
    _check("neuron", "run.device=neuron", "no neuron device", "--no-files"),
    Mistake("train finds the same", "train RECIPE data.path=nope.txt run.device=cuda", ("nope.txt", "no cuda device")),
)
RECIPES = (
    Mistake("no such recipe", "check nope.yaml", ("nope.yaml: there is no such recipe file", "Shipped recipes:")),
    Mistake("a folder as recipe", "check {empty_folder}", ("is a folder", "Name a recipe file")),
    Mistake("not YAML", "check {not_yaml}", ("is not valid YAML: ", "line")),
    Mistake("a list", "check {list_yaml}", ("is not a mapping of sections", "Start with 'run:'")),
    Mistake("binary", "check {binary}", ("binary", "cannot be read")),
    Mistake("key twice", "check {twice}", ("line 3", "'run' stands here twice")),
    Mistake("an empty recipe", "check {empty}", ("empty.yaml: is empty", "A recipe has model")),
    Mistake("braces that a shell has cut", "check RECIPE model={preset: tiny-1m}", ("Put it in quotes for the shell",)),
    Mistake("no value", "check RECIPE training.steps", ("training.steps: is not an override", "training.steps=100")),
    Mistake("a blank of a web page", "check {no_break}", ("holds a no-break space (U+00A0)", "an ordinary blank")),
    Mistake("dashes", "check RECIPE --training.steps=4", ("No such option", "Overrides take no dashes")),
)
COMMANDS = (
    Mistake("unknown verb", "trian RECIPE", ("No such command 'trian'", "Did you mean 'train'?")),
    Mistake("unknown option", "train RECIPE --n-proc 2", ("No such option: --n-proc", "--nproc")),
    Mistake("a verb for resuming", "resume nowhere", ("No such command 'resume'", "`hlat train RECIPE` resumes")),
    Mistake("an option for resuming", "train RECIPE --resume", ("--resume", "resumes by itself")),
    Mistake("epochs as an option", "train RECIPE --epochs 3", ("Here it is training.steps or training.tokens",)),
    Mistake(
        "a resume by option", "train RECIPE --resume-from-checkpoint c", ("same command, which resumes by itself",)
    ),
    Mistake("an override by option", "train RECIPE --set a.b=c", ("--set", "without an option: training.steps=100")),
    Mistake("a field as an option", "train RECIPE --lr 1", ("--lr", "takes no dashes: optimizer.lr=VALUE")),
    Mistake(
        "another program's option", "train RECIPE --learning-rate 1", ("--learning-rate", "dashes: optimizer.lr=VALUE")
    ),
    Mistake("a number of GPUs", "train RECIPE --gpus 8", ("--gpus", "Here it is --nproc")),
    Mistake("a number of GPUs to rehearse", "rehearse RECIPE --gpus 8", ("--gpus", "Here it is --world")),
    Mistake("a recipe as an option", "train --config RECIPE", ("--config", "The recipe is an argument")),
    Mistake("a host of how many", "train RECIPE --node 1", ("--node", "Add --nodes N on every host")),
    Mistake("a recipe for a run", "generate {twice} --prompt x", ("It is a file. If it is a recipe", "run.name")),
    Mistake("a step that is not there", "generate {step-00000004}-8 --prompt x", ("There is step-00000004.",)),
    Mistake("a run, nearly", "show {run_a}b", ("does not exist. Did you mean", "run_a?", "`hlat runs DIR` lists")),
    Mistake("a file for a run", "show {twice}", ("is not the folder of a run, but a file",)),
    Mistake(
        "three parts of eight devices",
        "plan --model llama-2-7b --cluster p5.48xlarge:1 --tokens 1B --layout tp=3",
        ("tensor 3", "is not the number of devices", "as in tp=2"),
    ),
    Mistake("a range of a library", "generate nowhere --prompt x --top-k 0", ("--top-k", "greater than or equal to 1")),
    Mistake("a dtype, nearly", "export nowhere --to x --dtype fp16", ("'fp16' is not one of", "Here it is 'float16'")),
    Mistake("nothing to train", "train", ("Missing argument 'recipe'", "Recipe file, or the name of a shipped recipe")),
    Mistake("no checkpoint", "generate nowhere --prompt x", ("nowhere",)),
    Mistake("no prompt", "generate nowhere", ("--prompt",)),
    Mistake("tokens of lots", "plan --model llama-2-7b --cluster h100:1 --tokens lots", ("--tokens lots", "300B")),
    Mistake("tokens of minutes", "generate nowhere --prompt x --max-tokens 3m", ("may mean millions or minutes",)),
    Mistake(
        "no tokens", "generate nowhere --prompt x --max-tokens 0", ("--max-tokens", "at least 1, as in 2000 or 2K")
    ),
    Mistake(
        "an instance, half", "plan --model llama-2-7b --cluster p5:1 --tokens 1B", ("did you mean p5.48xlarge or p5en",)
    ),
    Mistake(
        "a chip, nearly",
        "plan --model llama-2-7b --chips h300 --deadline 14d --tokens 300B",
        ("no such instance or chip; did you mean", "h100"),
    ),
    Mistake("a plan of a recipe", "plan {twice}", ("unexpected extra argument", "is an option: --model", "twice.yaml")),
    Mistake("a plan of no model", "plan --cluster h100:1", ("--model is missing", "as in --model llama-3.1-8b")),
    Mistake("a plan on nothing", "plan --model llama-2-7b", ("--cluster is missing", "as in --cluster p5.48xlarge:4")),
    Mistake(
        "prices of long ago",
        "plan --model llama-2-7b --cluster p5.48xlarge:1 --tokens 1B --prices-of 1999-01",
        ("no price of that month; the earliest are of 20",),
    ),
    Mistake("an option that is not there", "runs --frmt x", ("No such option: --frmt", "There are: ", "--json")),
    Mistake("a format of export", "export nowhere --to x --format gguf", ("--format", "Hugging Face's safetensors")),
    Mistake("hours of lots", "init nowhere --time lots", ("--time", "lots is no time", "2h, 1d")),
    Mistake(
        "a cluster of the family",
        "plan --model llama-2-7b --cluster trn9:4 --tokens 1B",
        ("mean trn1.32xlarge",),
    ),
    Mistake("a launch of no kind", "launch {twice}", ("No such command", "There are: slurm, kubernetes, local")),
    Mistake("a verb below, nearly", "checkpoint remove x", ("No such command 'remove'", "list, show, verify, prune")),
    Mistake("a sweep with blanks", "sweep RECIPE optimizer.lr=1, 2", ("Write optimizer.lr=1,2, without blanks",)),
    Mistake("a recipe for a job", "launch status {twice}", ("is a file. Give the folder of the run",)),
    Mistake("a job of no folder", "launch status nowhere", ("nowhere: there is no such folder (looked in",)),
    Mistake("a job never submitted", "launch status {empty_folder}", ("no job of Slurm was submitted for this",)),
    Mistake(
        "a text to show", "data show {short}", ("is a file, but no recipe", "`hlat init", "hlat data prepare RECIPE")
    ),
    Mistake("a recipe of another ending", "data show {other_ending}", ("training.stepps: there is no such field",)),
    Mistake("a table to verify", "data verify {parquet}", ("is a file, but no recipe", "a folder of prepared data")),
    Mistake("a text as recipe", "check {short}", ("is not a mapping of sections", "for a text, `hlat init")),
    Mistake("an export to a file", "export {run_a} --to x.gguf", ("x.gguf: an export is a folder", "such as x.")),
    Mistake("an average in a file", "average a b --to x.pt", ("x.pt: a checkpoint is a folder, not a .pt file.",)),
    Mistake("an archive that is not there", "compile RECIPE --unpack nix.tar", ("nix.tar", "compile RECIPE --to"), 3),
    Mistake("no such model", "plan --model llama-9-7b --cluster h100:1 --tokens 1B", ("llama-9-7b",)),
)
MISTAKES = (*FIELDS, *MODEL, *LAYOUT, *RUN, *FILES, *RECIPES, *COMMANDS)
