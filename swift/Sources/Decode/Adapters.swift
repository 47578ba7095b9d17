import Foundation

extension Manifest {
    private var adapterFolder: URL { folder.appendingPathComponent("adapters") }

    /// The names of the build's adapters, sorted; `shardmill adapter add` adds them.
    public var adapterNames: [String] {
        let found = (try? FileManager.default.contentsOfDirectory(atPath: adapterFolder.path)) ?? []
        return found.filter { FileManager.default.fileExists(atPath: adapterFile($0).path) }.sorted()
    }

    private func adapterFile(_ name: String) -> URL {
        adapterFolder.appendingPathComponent(name).appendingPathComponent("adapter.safetensors")
    }

    /// Return an adapter's matrices by part and input, each of the input's shape.
    ///
    /// - Throws: `ShardmillError` if the build takes no adapters or has none of that name, or if the file is damaged.
    func adapter(_ name: String) throws -> [String: [String: HostArray]] {
        if adapterRank == nil {
            throw ShardmillError(
                .request, "\(model) takes no adapters: set `program.adapters` in its config and build again")
        }
        let names = adapterNames
        if !names.contains(name) {
            let has = names.isEmpty ? "none" : names.joined(separator: ", ")
            throw ShardmillError(.request, "\(model): no adapter is called '\(name.prefix(100))'; it has \(has)")
        }
        let file = try TensorFile(adapterFile(name))
        var found: [String: [String: HostArray]] = [:]
        for part in parts {
            for input in part.adapters {
                let shape = part.inputs[input]!.map { $0.count(tokens: 1) }
                found[part.name, default: [:]][input] = try file.halves("\(part.name).\(input)", shape: shape)
            }
        }
        return found
    }
}
