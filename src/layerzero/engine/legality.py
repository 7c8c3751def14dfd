"""Which kernels may run a call: every limit of every candidate, all reasons and not just the first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from layerzero.core.arguments import Role
from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel, Trust
from layerzero.core.ledger import Ledger, Verdict
from layerzero.core.limit_kinds import Finding, Findings, Limit, Repair
from layerzero.core.limits import LAUNCH_CODES
from layerzero.core.operation import Routed
from layerzero.core.plan import Adaptation, Candidate
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine import batch_split, headroom, isolation, proofs
from layerzero.engine.health import Health, let_pass
from layerzero.engine.jit import BUILT, compiles_in_call
from layerzero.engine.policy import Lock, Policy, names_kernel
from layerzero.engine.probe import Machine, this_machine
from layerzero.engine.proofs import capture_reasons, how_to_vet


def judge(
    kernels: Collection[Kernel],
    facts: Facts,
    policy: Policy,
    machine: Machine,
    health: Health,
    ledger: Ledger,
    *,
    failed: Collection[str] = (),
) -> list[Candidate]:
    """Judge every kernel for one call; ``failed`` names kernels that just raised for it.

    Choosing needs no more than one reason of a refused kernel: :mod:`layerzero.engine.judgements` keeps what it can.
    """
    lock = policy.lock_for(facts, kernels)
    judged = []
    for kernel in kernels:
        reasons = policy_reasons(kernel, facts, policy)
        reasons += trust_reasons(kernel, facts, policy, machine, health, ledger, lock)
        reasons += headroom.reasons(kernel, facts, policy)
        adaptations = adaptations_for(kernel, facts)
        reasons += repair(kernel, limit_findings(kernel, facts.seen_in(kernel.layout)), facts, policy, adaptations)
        if kernel.id in failed:
            reasons.append(JUST_FAILED)
        if kernel.jit:
            reasons += built_reasons(kernel, facts, policy, reasons)
        judged.append(Candidate(kernel, tuple(reasons), tuple(adaptations)))
    return health.woken(last_resort(judged, facts, policy, lock), facts, lock)


def last_resort(judged: list[Candidate], facts: Facts, policy: Policy, lock: Lock | None) -> list[Candidate]:
    """What may run where nothing is legal as the call is: a batch in chunks, or the kernel that takes least memory."""
    if policy.batch_invariant and not policy.strict_mode and policy.allow_adaptation:
        judged = batch_split.one_by_one(judged, facts, lock, limit_findings)
    return headroom.last_resort(
        batch_split.last_resort(judged, facts, policy, lock, limit_findings), facts, policy, lock
    )


def completed(candidate: Candidate, facts: Facts, policy: Policy, machine: Machine) -> Candidate:
    """A refused kernel with its own reasons and those that the call, the policy and its library alone give."""
    kernel = candidate.kernel
    machine = isolation.machine(kernel, policy, machine) if policy.isolating else machine
    untested = machine.state(kernel.backend, facts.device).untested
    library = None if untested else library_reason(kernel, facts, machine, None)
    reasons = [*policy_reasons(kernel, facts, policy), *([] if library is None else [library]), *candidate.reasons]
    reasons += headroom.reasons(kernel, facts, policy)
    adaptations = adaptations_for(kernel, facts)
    reasons += repair(kernel, limit_findings(kernel, facts.seen_in(kernel.layout)), facts, policy, adaptations)
    told = [reason for place, reason in enumerate(reasons) if reason not in reasons[:place]]
    return replace(candidate, reasons=tuple(told), adaptations=tuple(adaptations))


def with_casts(judged: Sequence[Candidate], routed: Routed, policy: Policy) -> Sequence[Candidate]:
    """The candidates of a call whose tensors were cast: their plans do that, too, unless policy refuses it.

    The cast call is what is judged, timed and chosen for; a cast takes the same whatever kernel runs between.
    """
    steps, refused = [], cast_reasons(routed, policy)
    for name, (before, after) in routed.casts.items():
        text = f"cast {name or 'the result'} from {dtype_name(before)} to {dtype_name(after)}"
        steps.append(Adaptation("cast", name, text, after))
    return [
        replace(each, reasons=(*each.reasons, *refused), adaptations=(*steps, *each.adaptations)) for each in judged
    ]


def cast_reasons(routed: Routed, policy: Policy) -> list[Reason]:
    """Why policy refuses a call whose tensors were cast, whatever would run it."""
    if policy.allow_adaptation and not policy.strict_mode:
        return []
    code, hint = ReasonCode.DTYPE_UNSUPPORTED, "strict_mode and allow_adaptation: false cast nothing; cast it yourself"
    cast = [(name, *map(dtype_name, dtypes)) for name, dtypes in routed.casts.items() if name]
    return [Reason(code, name, after, before, hint) for name, before, after in cast]


JUST_FAILED = Reason(ReasonCode.BACKEND_ERROR, "this call", "a result", "an exception; see the log")


def repair(
    kernel: Kernel, findings: Iterable[Finding], facts: Facts, policy: Policy, adaptations: list[Adaptation]
) -> list[Reason]:
    """Add the adaptations that make findings good, and give the reasons that are left."""
    reasons = []
    for finding in findings:
        repaired = _repaired(kernel, finding.repair, facts, policy)
        if repaired is None:
            reasons.append(finding.reason)
        elif repaired not in adaptations:
            adaptations.append(repaired)
    return reasons


def policy_reasons(kernel: Kernel, facts: Facts, policy: Policy) -> list[Reason]:
    """What the operator forbids. A lock names the one kernel that may run; that is not a reason but a choice."""
    reasons: list[Reason] = []
    if kernel.asked_for or policy.invariant:
        reasons += proofs.reasons(kernel, facts, policy)
    if not policy.enabled and (kernel.source not in ("torch", "reference") or kernel.widens is not None):
        own = kernel.source if kernel.widens is None else kernel.id  # torch itself emulates half precision
        reasons.append(_denied("enabled: false", "torch's own kernels or the reference", own))
    if not policy.fallback_enabled and kernel.is_reference:
        reasons.append(_denied("fallback_enabled: false", "a kernel other than the reference", kernel.id))
    denying = [pattern for pattern in policy.deny if names_kernel(pattern, kernel)]
    reasons += [_denied(f"deny: {pattern}", "another kernel", kernel.id) for pattern in denying]
    if policy.isolating:
        reasons += isolation.reasons(kernel, facts, policy)
    if policy.allow and not kernel.is_reference and not any(names_kernel(each, kernel) for each in policy.allow):
        reasons.append(_denied("allow", " or ".join(policy.allow), kernel.id))
    for index, rule in enumerate(policy.rules):
        if rule.deny and any(names_kernel(pattern, kernel) for pattern in rule.deny) and rule.matches(facts):
            reasons.append(_denied(f"rules[{index}].deny", "another kernel", kernel.id))
    return reasons


def _denied(fact: str, wanted: str, got: str) -> Reason:
    return Reason(ReasonCode.POLICY_DENIED, fact, wanted, got)


def trust_reasons(
    kernel: Kernel,
    facts: Facts,
    policy: Policy,
    machine: Machine | None,
    health: Health,
    ledger: Ledger,
    lock: Lock | None,
) -> list[Reason]:
    """Whether the library is there, the kernel is healthy, and vetted where that is required.

    Without a machine the library is known to be there.
    """
    here = machine is None or _as_here(kernel, facts.device, machine)  # what was seen here holds for versions
    judgement = ledger.judgement(kernel, facts) if here else None
    verdict = None if judgement is None else judgement.verdict
    if machine is not None and policy.isolating:
        machine = isolation.machine(kernel, policy, machine)
    library = None if machine is None else library_reason(kernel, facts, machine, verdict)
    reasons = [] if library is None else [library]
    reasons += health.reasons(kernel, str(facts["operation"]), facts.device.name)
    suspicion = ledger.suspicion(kernel, facts) if here else None
    if suspicion is not None:
        hint = "Run it in a child process: `layerzero doctor --confirm`, or lz.confirm_suspects()"
        wanted = "a suspect that a child process cleared"
        reasons.append(Reason(ReasonCode.UNHEALTHY, f"{kernel.id} with sizes like these", wanted, suspicion, hint))
    if verdict in (Verdict.WRONG, Verdict.CRASHED, Verdict.HUNG):
        hint = f"Another version of its library clears it, or `layerzero vet --kernel {kernel.id} --again`"
        wanted = "a kernel that passed vetting"
        reasons.append(Reason(ReasonCode.UNHEALTHY, "vetting on this machine", wanted, judgement, hint))
    elif verdict is not Verdict.PASSED and kernel.proved_first and kernel.needs_proof(facts):  # a lock is no proof
        hint = f"`layerzero vet {facts.operation.name} --kernel {kernel.id} --param ...` proves it, and lz.tune does"
        wanted, got = "proved to be the same", "a form of its own, without a proof"
        reasons.append(Reason(ReasonCode.NOT_VETTED, kernel.id, wanted, got, hint))
    elif policy.require_vetting and kernel.trust.needs_verdict and verdict is not Verdict.PASSED:
        locked = lock is not None and names_kernel(lock.kernel, kernel)
        if not locked:  # a lock is the operator's word for it
            hint = how_to_vet(kernel, facts)
            got = "a plugin without a verdict" if kernel.trust is Trust.PLUGIN else "never run, without a verdict"
            reasons.append(Reason(ReasonCode.NOT_VETTED, kernel.id, "vetted", got, hint))
    return reasons + (capture_reasons(kernel, facts, policy, ledger) if here and facts["capturing"] else [])


def _as_here(kernel: Kernel, device: Device, machine: Machine) -> bool:
    """Whether the machine in question has the versions of this one, as far as a kernel's library goes."""
    here, backend = this_machine(), kernel.backend
    if machine.asked is None:
        return True
    return machine.torch == here.torch and machine.version(backend, device) == here.version(backend, device)


_LIFTED = LAUNCH_CODES | {ReasonCode.MEMORY_HEADROOM_EXCEEDED}
"""What :func:`last_resort` may lift."""


def built_reasons(kernel: Kernel, facts: Facts, policy: Policy, reasons: Sequence[Reason]) -> list[Reason]:
    """Whether the kernel is built, looked up only where nothing else keeps it from the call.

    ``reasons`` are all others. What only a launch grid or its memory refuses may run yet, and is checked, too.
    """
    if compiles_in_call(kernel, facts, policy) or (reasons and any(reason.code not in _LIFTED for reason in reasons)):
        return []
    found: list[Reason] = []
    if not _ready(kernel, facts, found):
        hint = "Build it with lz.warmup, or set allow_jit_compile"
        if policy.jit == "background":
            hint = "It is built in the background where it would be chosen (lz.jit_status()), or by lz.warmup"
        found.append(Reason(ReasonCode.JIT_DISABLED, kernel.id, "built", "not built yet", hint))
    return found


def library_reason(kernel: Kernel, facts: Facts, machine: Machine, verdict: Verdict | None) -> Reason | None:
    """Why the library cannot be used here; a verdict lifts it where only the version is not a tested one."""
    state = machine.state(kernel.backend, facts.device)
    if state.reason is None or (state.untested and verdict is Verdict.PASSED):
        return None
    before = None if kernel.revision is None else kernel.revision.before.backend
    own = before is None or machine.state(before, facts.device).reason is not None
    return state.reason if own else _hinted(state.reason, kernel)


def untrusted(kernel: Kernel, device: Device) -> bool:
    """Whether a kernel may not run here before it was vetted: a plugin's, one never run, or of an untested version."""
    state = this_machine().state(kernel.backend, device)
    return state.untested or (kernel.trust.needs_verdict and state.reason is None)


def only_unbuilt(candidate: Candidate) -> bool:
    """Whether nothing but its missing artefact keeps a kernel from a call, as far as it was judged."""
    reasons = candidate.reasons
    return len(reasons) == 1 and reasons[0].code is ReasonCode.JIT_DISABLED


def awaiting(candidates: Iterable[Candidate], facts: Facts) -> list[Kernel]:
    """The kernels that only vetting keeps from a call."""
    found = []
    for each in candidates:
        untested = this_machine().state(each.kernel.backend, facts.device).untested
        lifted = {ReasonCode.NOT_VETTED, ReasonCode.VERSION_UNSUPPORTED} if untested else {ReasonCode.NOT_VETTED}
        if each.reasons and {reason.code for reason in each.reasons} <= lifted:
            found.append(each.kernel)
    return found


def _ready(kernel: Kernel, facts: Facts, reasons: list[Reason]) -> bool:
    """Whether the artefact for a call exists; a declaration that cannot say refuses its kernel and nothing else."""
    try:
        return BUILT.ready(kernel, facts)
    except Exception as error:  # noqa: BLE001  # third parties write build_key and prebuilt, too
        let_pass(error)
        got = f"{type(error).__name__}: {error}"
        reasons.append(Reason(ReasonCode.CONSTRAINT_FAILED, "build_key and prebuilt", "an answer", got))
        return True


def limit_findings(kernel: Kernel, facts: Facts) -> list[Finding]:
    """What the kernel's limits, arguments and flags say about facts that are in its layout.

    What only a descriptor refuses names it: the kernel without it is checked, too.
    """
    findings = _findings(kernel, facts)
    if kernel.revision is None or not findings:
        return findings
    before = {(found.reason.code, found.reason.fact): found for found in limit_findings(kernel.revision.before, facts)}
    told = []
    for finding in findings:
        earlier = before.get((finding.reason.code, finding.reason.fact))
        hint = _hinted(finding.reason, kernel) if earlier is None else replace(finding.reason, hint=earlier.reason.hint)
        told.append(Finding(hint, finding.repair))
    return told


def _hinted(reason: Reason, kernel: Kernel) -> Reason:
    return replace(reason, hint=f"{reason.hint} Said by the descriptor {kernel.revision}".strip())


def _findings(kernel: Kernel, facts: Facts) -> list[Finding]:
    away = elsewhere(kernel, facts)
    if away is not None:
        return [Finding(away)]  # the other limits speak about hardware that is not there
    return [finding for limit in kernel.limits for finding in checked(limit, facts)] + flag_findings(kernel, facts)


def flag_findings(kernel: Kernel, facts: Facts) -> list[Finding]:
    """What the kernel's arguments and flags say, apart from its limits."""
    return [*argument_findings(kernel, facts), *state_findings(kernel, facts), *memory_findings(kernel, facts)]


def state_findings(kernel: Kernel, facts: Facts) -> list[Finding]:
    """What the kernel's flags say about the eager state of the call."""
    findings = []
    if facts["requires_grad"] and not kernel.grad:
        findings.append(Finding(Reason(ReasonCode.GRAD_UNSUPPORTED, "requires_grad", False, True)))
    if facts["deterministic"] and not proofs.declared(kernel.deterministic, facts):
        findings.append(Finding(Reason(ReasonCode.NON_DETERMINISTIC, "deterministic", "the same", "not deterministic")))
    if facts["capturing"] and not kernel.graph_safe:
        findings.append(Finding(Reason(ReasonCode.CUDA_GRAPH_UNSAFE, "graph_safe", "graph-safe", "not graph-safe")))
    asked = None if kernel.is_reference else facts.operation.left_by_state
    left = None if asked is None else asked(facts)
    if left is not None and kernel.source not in left[1]:
        findings.append(Finding(_denied(left[0], " or ".join(left[1]), kernel.source)))
    return findings


NOT_EMPTY = "not empty"
"""What a kernel wants of a tensor that takes none without elements."""


def memory_findings(kernel: Kernel, facts: Facts) -> list[Finding]:
    """What the kernel's flags say about tensors without elements, and about those with the negative bit."""
    findings = []
    for name, tensor in facts.tensors.items():
        if not kernel.handles_empty and 0 in tensor.shape:
            reason = Reason(ReasonCode.CONSTRAINT_FAILED, f"{name}.shape", NOT_EMPTY, tensor.shape)
            findings.append(Finding(reason))
        if tensor.negated and not kernel.handles_negated:
            reason = Reason(ReasonCode.CONSTRAINT_FAILED, f"{name}.is_neg()", False, True)
            findings.append(Finding(reason, Repair("negate", name)))
    return findings


def elsewhere(kernel: Kernel, facts: Facts) -> Reason | None:
    """Why a kernel's library does not serve this platform at all."""
    if facts.device.platform in kernel.backend.platforms or kernel.backend.origin == "decorator":
        return None
    wanted = " or ".join(kernel.backend.platforms)
    return Reason(ReasonCode.PLATFORM_MISMATCH, "platform", wanted, facts.device.platform)


def checked(limit: Limit, facts: Facts) -> Findings:
    """Evaluate one limit; one that cannot be evaluated refuses its kernel and nothing else."""
    try:
        return limit.check(facts)
    except Exception as error:  # noqa: BLE001  # third parties write limits, too
        let_pass(error)
        got = f"{type(error).__name__}: {error}"
        return (Finding(Reason(ReasonCode.CONSTRAINT_FAILED, limit.describe(), "a limit that can be evaluated", got)),)


def final(finding: Finding) -> bool:
    """Whether nothing makes it good: no repair does, and no smaller batch (:mod:`layerzero.engine.batch_split`)."""
    return finding.repair is None and finding.reason.code not in LAUNCH_CODES


def argument_findings(kernel: Kernel, facts: Facts) -> list[Finding]:
    """An argument that the kernel does not know must be absent or at the value at which it does nothing."""
    schema = facts.operation.schema
    findings = [
        _unaccepted(kernel, tensor.name, tensor.code, "absent", "given")
        for tensor in schema.optional
        if tensor.name not in kernel.accepts and facts[tensor.name] != "none"
    ]
    for param in schema.params:
        name = param.name
        if name in kernel.accepts or name in kernel.implies or name in schema.promises:
            continue
        neutral = schema.neutral.get(name) if param.role is Role.CHOSEN else "none"
        got = facts[name]
        if got != neutral:
            findings.append(_unaccepted(kernel, name, param.code, neutral, got))
    return findings


def _unaccepted(kernel: Kernel, argument: str, code: ReasonCode, wanted: object, got: object) -> Finding:
    repair = Repair("fold", argument) if argument in kernel.folds else None
    return Finding(Reason(code, argument, wanted, got), repair)


def adaptations_for(kernel: Kernel, facts: Facts) -> list[Adaptation]:
    """What a plan does because the kernel has another layout than the call."""
    if kernel.layout is None or facts.layout is None or kernel.layout == facts.layout:
        return []
    return [Adaptation("view", "layout", f"{facts.layout} seen as {kernel.layout} (strides only)")]


_REPAIR_TEXT = {"copy": "copy {argument} into contiguous memory", "negate": "resolve the negative bit of {argument}"}
"""What a plan can do for any operation; the others bring their own (``Operation.adapters``)."""


def _repaired(kernel: Kernel, repair: Repair | None, facts: Facts, policy: Policy) -> Adaptation | None:
    """The adaptation that makes a violation good, None if there is none or it is not allowed."""
    if repair is None or repair.kind == "split" or policy.strict_mode or not policy.allow_adaptation:
        return None
    text = _REPAIR_TEXT.get(repair.kind)
    if text is not None:
        schema = facts.operation.schema.tensor(repair.argument)
        if schema.mutated or schema.resident:
            return None  # the caller's tensor must change, not a copy of it; a cache is too large for one
    else:
        adapter = facts.operation.adapters.get(repair.kind)
        if adapter is None or (adapter.absorbs and not kernel.folds):
            return None
        text = adapter.text
    return Adaptation(repair.kind, repair.argument, text.format(argument=repair.argument))
