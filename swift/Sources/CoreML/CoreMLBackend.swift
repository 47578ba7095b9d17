import CoreML
import Foundation
import ShardmillDecode

#if !canImport(ObjectiveC)
/// Outside Apple's systems there is no pool to drain.
func autoreleasepool<Result>(invoking body: () throws -> Result) rethrows -> Result { try body() }
#endif

/// Programs on Core ML, which runs them on the Neural Engine.
///
/// One thread uses it at a time. Core ML never sees an array that is being written: inputs are the package's own, made
/// once, and outputs are copied before the next pass. No array is a backing of an output, and none is accessed by
/// `dataPointer`: both made Core ML copy in silence, or fail, in other projects.
package final class CoreMLBackend: Backend {
    private let bundles: [String: URL]
    private let units: MLComputeUnits
    private let reshape: String

    /// Make a back end; nothing is loaded yet.
    ///
    /// - Parameters:
    ///   - bundles: for each part's name, the compiled bundle that this system may load; see `Compiler`.
    ///   - manifest: the build's model.json.
    ///   - units: where programs may run; anything else than the default is the caller's explicit choice.
    package init(bundles: [String: URL], manifest: Manifest, units: MLComputeUnits = .cpuAndNeuralEngine) {
        self.bundles = bundles
        self.units = units
        reshape = manifest.reshapeFrequency
    }

    /// Make a back end for an encoder, whose programs have fixed shapes.
    package init(bundles: [String: URL], units: MLComputeUnits = .cpuAndNeuralEngine) {
        self.bundles = bundles
        self.units = units
        reshape = "infrequent"
    }

    /// Load one function of a part's program, which may take minutes.
    ///
    /// - Throws: `ShardmillError` with the part's name.
    package func load(_ part: Part, function: String) throws -> any LoadedFunction {
        let configuration = MLModelConfiguration()
        configuration.computeUnits = units
        configuration.modelDisplayName = part.name
        var url = bundles[part.name] ?? part.program
        if let own = part.bundles[function], bundles[part.name] == nil {
            url = own
        } else if !function.isEmpty {
            configuration.functionName = function
        }
        if part.functions.isEmpty {  // one function takes every width
            configuration.optimizationHints.reshapeFrequency = reshape == "frequent" ? .frequent : .infrequent
        }
        do {
            return CoreMLFunction(try MLModel(contentsOf: url, configuration: configuration), part.name, units)
        } catch {
            throw failure(part.name, "loaded", units, error)
        }
    }
}

/// Return the error for a part that Core ML refused.
private func failure(_ part: String, _ what: String, _ units: MLComputeUnits, _ error: any Error) -> ShardmillError {
    let advice =
        units == .cpuAndNeuralEngine
        ? "; if the Neural Engine of this device can't take it, open the model with units: .gpu" : ""
    return ShardmillError(.program, "\(part) can't be \(what): \(error.localizedDescription)\(advice)")
}

/// A loaded function, and the provider that hands it its inputs.
private final class CoreMLFunction: LoadedFunction {
    private let model: MLModel
    private let name: String
    private let units: MLComputeUnits
    private let provider = Inputs()
    private let options = MLPredictionOptions()

    init(_ model: MLModel, _ name: String, _ units: MLComputeUnits) {
        self.model = model
        self.name = name
        self.units = units
    }

    func makeState() throws -> any ProgramState { CoreMLState(model.makeState()) }

    func makeBuffer(_ input: String, shape: [Int]) throws -> any Buffer {
        let kind = model.modelDescription.inputDescriptionsByName[input]?.multiArrayConstraint?.dataType ?? .float16
        let array = try MLMultiArray(
            shape: shape.map { NSNumber(value: $0) }, dataType: kind == .float32 ? .float32 : .float16)
        let buffer = CoreMLBuffer(array)
        try buffer.write([Float](repeating: 0, count: shape.reduce(1, *)))
        return buffer
    }

    func run(_ inputs: [String: any Buffer], state: (any ProgramState)?) throws -> [String: any Buffer] {
        for (input, buffer) in inputs {
            guard let buffer = buffer as? CoreMLBuffer else {
                throw ShardmillError(.program, "\(input) is another back end's")
            }
            provider.set(input, buffer)
        }
        do {
            // Without the pool, the Neural Engine's few output ports run out after some passes.
            return try autoreleasepool {
                let found =
                    if let state = state as? CoreMLState {
                        try model.prediction(from: provider, using: state.state, options: options)
                    } else {
                        try model.prediction(from: provider, options: options)
                    }
                var outputs: [String: any Buffer] = [:]
                for output in found.featureNames {
                    guard let array = found.featureValue(for: output)?.multiArrayValue else { continue }
                    outputs[output] = CoreMLBuffer(array)
                }
                return outputs
            }
        } catch {
            throw failure(name, "run", units, error)
        }
    }
}

/// One provider for all passes of a function: a new dictionary for every pass would cost more than the pass's arrays.
private final class Inputs: NSObject, MLFeatureProvider {
    private var values: [String: MLFeatureValue] = [:]
    private var buffers: [String: CoreMLBuffer] = [:]

    var featureNames: Set<String> { Set(values.keys) }

    func featureValue(for featureName: String) -> MLFeatureValue? { values[featureName] }

    func set(_ name: String, _ buffer: CoreMLBuffer) {
        if buffers[name] === buffer { return }
        buffers[name] = buffer
        values[name] = MLFeatureValue(multiArray: buffer.array)
    }
}

/// The states of a program. They are never touched while a prediction runs.
final class CoreMLState: ProgramState {
    let state: MLState

    init(_ state: MLState) { self.state = state }

    func read(_ name: String) throws -> HostArray {
        try state.withMultiArray(for: name) { array in
            let buffer = CoreMLBuffer(array)
            return HostArray(shape: buffer.shape, values: try buffer.read())
        }
    }

    func write(_ name: String, _ array: HostArray) throws {
        try state.withMultiArray(for: name) { try CoreMLBuffer($0).write(array.values) }
    }
}
