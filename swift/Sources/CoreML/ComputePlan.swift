import CoreML
import Foundation
import ShardmillDecode

/// Where Core ML plans to run a program's operations: a diagnosis for people, never a gate.
package struct ComputePlan: Sendable {
    /// Numbers of operations by device: "neuralEngine", "gpu", "cpu"; constants are left out.
    package let operations: [String: Int]
    /// Names of the operations that would not run on the Neural Engine.
    package let elsewhere: [String]

    /// Ask Core ML about a function of a compiled bundle, at its default shape.
    package static func load(_ bundle: URL, function: String = "") async throws -> ComputePlan {
        let configuration = MLModelConfiguration()
        configuration.computeUnits = .cpuAndNeuralEngine
        if !function.isEmpty { configuration.functionName = function }
        let plan = try await MLComputePlan.load(contentsOf: bundle, configuration: configuration)
        guard case .program(let program) = plan.modelStructure else {
            throw ShardmillError(.program, "\(bundle.lastPathComponent) is no ML program")
        }
        var operations: [String: Int] = [:]
        var elsewhere: [String] = []
        let block = (program.functions[function] ?? program.functions["main"] ?? program.functions.values.first)?.block
        for operation in block?.operations ?? [] {
            guard let usage = plan.deviceUsage(for: operation) else { continue }
            let device =
                switch usage.preferred {
                case .neuralEngine: "neuralEngine"
                case .gpu: "gpu"
                case .cpu: "cpu"
                @unknown default: "other"  // a kind of device that Apple adds later
                }
            operations[device, default: 0] += 1
            if device != "neuralEngine" { elsewhere.append(operation.operatorName) }
        }
        return ComputePlan(operations: operations, elsewhere: elsewhere)
    }
}
