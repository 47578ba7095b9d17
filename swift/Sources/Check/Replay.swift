import Foundation
import ShardmillCoreML
import ShardmillDecode
import ShardmillPipe

/// What the replay of a kit found: the file to send back.
struct ReplayReport: Codable {
    var format = 1
    let machine: [String: String]
    /// "coreml", or "pipe": the portable engine in another process, whose times say nothing of a device.
    let engine: String
    var variants: [Variant] = []
    /// The most memory that the process took, in bytes.
    var peakBytes = 0

    struct Variant: Codable {
        let name: String
        let model: String
        /// SHA-256 of the files of each part's package.
        let artifacts: [String: [String: String]]
        var functions: [Function] = []
        /// Why nothing of it was replayed.
        var skipped: String?
    }

    /// One function of a part.
    struct Function: Codable {
        let part: String
        let function: String
        /// The first load includes what the system specialises.
        var loadSeconds = 0.0
        var firstPassSeconds: Double?
        var inputs: [String: ArrayLayout] = [:]
        var states: [String: ArrayLayout] = [:]
        var widths: [Width] = []
        /// Numbers of operations by the device that Core ML plans to run them on.
        var plan: [String: Int]?
        var elsewhere: [String]?
        var error: String?
    }

    /// The recorded passes of one width.
    struct Width: Codable {
        let width: Int
        let passes: Int
        /// Against the recorded fp32 outputs and against fp16 rounding, in dB; the least of all passes.
        var psnr = Double.infinity
        var psnrEmulated = Double.infinity
        /// The share of elements that are equal to those with fp16 rounding.
        var equal = 0.0
        /// Seconds of a pass that has run before: the median and the least of some.
        var warmSeconds: [Double] = []
        var output: ArrayLayout?
        /// Whether an output is the object, or lies in the memory, of the pass before, while that one is still held.
        var isLastObject: Bool?
        var isLastMemory: Bool?
        /// Whether the output of the pass before still had its values after the next pass.
        var lastKept: Bool?
        var passed = false
    }

    /// Return whether every program gave what was recorded.
    var passed: Bool {
        let functions = variants.flatMap(\.functions)
        return !functions.isEmpty && functions.allSatisfy { $0.error == nil && $0.widths.allSatisfy(\.passed) }
    }
}

/// Replay a kit and write the report; return whether every program gave what was recorded.
///
/// - Parameter arguments: KIT [RESULT] [--engine coreml|pipe]. Without RESULT it is KIT/swift-result.json.
func replay(_ arguments: [String]) async throws -> Bool {
    var engine: String?
    var paths: [String] = []
    var rest = arguments[...]
    while let argument = rest.popFirst() {
        if argument == "--engine" { engine = rest.popFirst() } else { paths.append(argument) }
    }
    #if canImport(ObjectiveC)
    let usual = "coreml"
    #else
    let usual = "pipe"
    #endif
    guard (1...2).contains(paths.count), ["coreml", "pipe"].contains(engine ?? usual) else {
        throw ShardmillError(.request, "usage: shardmill-check replay KIT [RESULT] [--engine coreml|pipe]")
    }
    let folder = URL(fileURLWithPath: paths[0])
    let pipe = (engine ?? usual) == "pipe" ? PipeBackend() : nil
    let report = try await replay(folder, pipe: pipe) { FileHandle.standardError.write(Data("\($0)\n".utf8)) }
    let usualTarget = folder.appendingPathComponent("swift-result.json")
    let target = paths.count == 2 ? URL(fileURLWithPath: paths[1]) : usualTarget
    let encoder = JSONEncoder()
    encoder.outputFormatting = [.prettyPrinted, .sortedKeys]
    encoder.nonConformingFloatEncodingStrategy = .convertToString(
        positiveInfinity: "inf", negativeInfinity: "-inf", nan: "nan")
    try encoder.encode(report).write(to: target)
    try pipe?.ask(["op": "report", "report": ["passed": report.passed, "result": target.path]])
    FileHandle.standardError.write(Data("\(report.passed ? "passed" : "FAILED"); send back \(target.path)\n".utf8))
    return report.passed
}

/// Replay a kit's recorded passes through a back end of the package.
///
/// - Parameters:
///   - folder: the unpacked kit.
///   - pipe: the portable engine in another process; nil for Core ML.
///   - note: called with a line for each function.
func replay(_ folder: URL, pipe: PipeBackend?, note: (String) -> Void) async throws -> ReplayReport {
    let kit = try Kit(folder)
    var report = ReplayReport(machine: machine(), engine: pipe == nil ? "coreml" : "pipe")
    for variant in kit.content.variants {
        var found = ReplayReport.Variant(name: variant.name, model: variant.model, artifacts: variant.artifacts)
        do {
            let manifest = try Manifest(folder: kit.build(variant))
            let bundles: [String: URL]
            let backend: any Backend
            if let pipe {
                pipe.programs = manifest.packages  // a kit's bundles lack what the packages have too
                (bundles, backend) = ([:], pipe)
            } else {
                bundles = try await Compiler(cache: folder.appendingPathComponent("compiled")).bundles(manifest)
                backend = CoreMLBackend(bundles: bundles, manifest: manifest)
            }
            for part in variant.parts {
                guard let own = manifest.parts.first(where: { $0.name == part.name }) else { continue }
                for program in part.programs {
                    var function = ReplayReport.Function(part: part.name, function: program.function ?? "")
                    do {
                        let passes = Replay(kit: kit, variant: variant, part: part, program: program)
                        try passes.run(own, backend, into: &function)
                    } catch {
                        function.error = describe(error)
                    }
                    let loaded = bundles[part.name] ?? own.program
                    if pipe == nil, let plan = try? await ComputePlan.load(loaded, function: function.function) {
                        function.plan = plan.operations
                        function.elsewhere = plan.elsewhere
                    }
                    note(line(variant.name, function))
                    found.functions.append(function)
                }
            }
        } catch let error as ShardmillError where error.kind == .build {
            found.skipped = error.message
            note("\(variant.name): skipped: \(error.message)")
        }
        report.variants.append(found)
    }
    report.peakBytes = peakBytes()
    return report
}

/// The recorded passes of one program.
private struct Replay {
    let kit: Kit
    let variant: Kit.Variant
    let part: Kit.Part
    let program: Kit.Program

    /// Passes whose time is taken, after those that were recorded.
    private static let warmPasses = 10

    func run(_ own: Part, _ backend: any Backend, into found: inout ReplayReport.Function) throws {
        let clock = ContinuousClock()
        var start = clock.now
        let function = try backend.load(own, function: program.function ?? "")
        found.loadSeconds = seconds(clock.now - start)
        for width in program.widths {
            let passes = (variant.recorded[String(width)] ?? []).compactMap { $0[part.name] }
            if passes.isEmpty { continue }  // routed experts that no token came to
            var result = ReplayReport.Width(width: width, passes: passes.count)
            let state = part.stateful ? try function.makeState() : nil
            var inputs: [String: any Buffer] = [:]
            var last: (buffer: any Buffer, values: [Float])?
            var (equal, total) = (0, 0)
            for pass in passes {
                for (name, key) in pass.inputs {
                    let array = try kit.array(key)
                    if inputs[name] == nil { inputs[name] = try function.makeBuffer(name, shape: array.shape) }
                    try inputs[name]?.write(array.values)
                }
                start = clock.now
                let output = try self.output(try function.run(inputs, state: state))
                if found.firstPassSeconds == nil { found.firstPassSeconds = seconds(clock.now - start) }
                let values = try output.read()
                if let last {
                    result.isLastObject = ArrayLayout.isOneObject(last.buffer, output)
                    result.isLastMemory = ArrayLayout.isOneMemory(last.buffer, output)
                    result.lastKept = try last.buffer.read() == last.values && result.lastKept ?? true
                }
                last = (output, values)
                let kept = sampled(values, output.shape, pass.stride)
                let (fp32, fp16) = (try kit.array(pass.fp32).values, try kit.array(pass.fp16).values)
                if kept.count != fp32.count || kept.count != fp16.count {
                    throw ShardmillError(
                        .program, "\(part.name) gave \(kept.count) elements, recorded were \(fp32.count)")
                }
                result.psnr = least(result.psnr, psnr(kept, fp32))
                result.psnrEmulated = least(result.psnrEmulated, psnr(kept, fp16))
                equal += zip(kept, fp16).reduce(0) { $0 + ($1.0 == $1.1 ? 1 : 0) }
                total += kept.count
                result.output = ArrayLayout(output)
            }
            result.equal = Double(equal) / Double(max(1, total))
            result.passed = result.psnr >= kit.content.limits.psnr  // false for NaN
            // The last pass again writes the same rows into the same slots.
            let times = try (0..<Self.warmPasses).map { _ in
                start = clock.now
                _ = try function.run(inputs, state: state)
                return seconds(clock.now - start)
            }.sorted()
            result.warmSeconds = [times[times.count / 2], times[0]]
            found.inputs = inputs.compactMapValues { ArrayLayout($0) }
            if let state { found.states = own.states.keys.reduce(into: [:]) { $0[$1] = ArrayLayout($1, of: state) } }
            found.widths.append(result)
        }
    }

    private func output(_ outputs: [String: any Buffer]) throws -> any Buffer {
        guard let output = outputs[part.output] else {
            throw ShardmillError(.program, "\(part.name) has no output \(part.output)")
        }
        return output
    }
}

/// Return every `stride`-th channel of an output [1, channels, ...].
private func sampled(_ values: [Float], _ shape: [Int], _ stride: Int) -> [Float] {
    if stride <= 1 || shape.count < 2 { return values }
    let inner = shape[2...].reduce(1, *)
    return (0..<shape[1]).filter { $0 % stride == 0 }.flatMap { values[$0 * inner..<($0 + 1) * inner] }
}

/// Return the peak signal-to-noise ratio in dB, as the kit's measure.py does; the peak is the largest expected
/// magnitude.
private func psnr(_ values: [Float], _ expected: [Float]) -> Double {
    var (noise, peak) = (0.0, 0.0)
    for (value, expected) in zip(values, expected) {
        noise += (Double(value) - Double(expected)) * (Double(value) - Double(expected))
        peak = max(peak, abs(Double(expected)))
    }
    if noise.isNaN { return .nan }
    return 20 * log10(max(peak, 1e-30)) - 10 * log10(max(noise / Double(max(1, values.count)), 1e-30))
}

/// Return the smaller number; NaN if one is.
private func least(_ a: Double, _ b: Double) -> Double { a.isNaN || b.isNaN ? .nan : min(a, b) }

private func seconds(_ duration: Duration) -> Double {
    Double(duration.components.seconds) + Double(duration.components.attoseconds) * 1e-18
}

private func line(_ variant: String, _ found: ReplayReport.Function) -> String {
    let name = "\(variant) \(found.part)\(found.function.isEmpty ? "" : " \(found.function)")"
    if let error = found.error { return "\(name): FAILED: \(error)" }
    let widths = found.widths.map { width in
        let padded = width.output.map { $0.isPadded ? ", padded output" : "" } ?? ""
        return String(
            format: "T=%d %@ %.1f dB, %.2f%% equal, %.2f ms%@", width.width, width.passed ? "ok" : "FAILED", width.psnr,
            100 * width.equal, 1000 * (width.warmSeconds.first ?? 0), padded)
    }
    let plan = found.plan.map { plan in
        "; " + plan.sorted { $0.key < $1.key }.map { "\($0.value) \($0.key)" }.joined(separator: ", ")
    }
    return String(format: "%@: load %.2f s, first %.2f s; ", name, found.loadSeconds, found.firstPassSeconds ?? 0)
        + widths.joined(separator: "; ") + (plan ?? "")
}

private func machine() -> [String: String] {
    var found = ["system": ProcessInfo.processInfo.operatingSystemVersionString]
    found["memory"] = String(ProcessInfo.processInfo.physicalMemory)
    #if canImport(Darwin)
    for (key, name) in ["chip": "machdep.cpu.brand_string", "model": "hw.model"] {
        var size = 0
        if sysctlbyname(name, nil, &size, nil, 0) != 0 || size == 0 { continue }
        var text = [CChar](repeating: 0, count: size)
        if sysctlbyname(name, &text, &size, nil, 0) == 0 {
            found[key] = String(decoding: text.prefix { $0 != 0 }.map { UInt8(bitPattern: $0) }, as: UTF8.self)
        }
    }
    #endif
    return found
}

private func peakBytes() -> Int {
    var usage = rusage()
    #if canImport(Darwin)
    let unit = 1
    #else
    let unit = 1024
    #endif
    return getrusage(0, &usage) == 0 ? usage.ru_maxrss * unit : 0  // 0 is RUSAGE_SELF, whose type differs by system
}
